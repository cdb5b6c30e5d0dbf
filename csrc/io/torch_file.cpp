#include "io/torch_file.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <map>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "io/torch_pickle.h"

namespace llmserve {
namespace {

constexpr size_t kMaxRecords = 1 << 16;

struct Record {
  int64_t offset = 0;
  int64_t num_bytes = 0;
};

// The directory of a zip file: PKWARE's APPNOTE 6.3.10, 4.3 and 4.5.3.
class ZipReader {
 public:
  explicit ZipReader(const MappedFile& file) : file_(file), path_(file.path().string()) {}

  std::map<std::string, Record, std::less<>> records() {
    const auto [first, count] = find_directory();
    std::map<std::string, Record, std::less<>> found;
    int64_t at = first;
    for (int64_t i = 0; i < count; ++i) at = read_entry(at, found);
    return found;
  }

 private:
  static constexpr uint32_t kEnd = 0x06054b50, kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
  static constexpr uint32_t kEntry = 0x02014b50, kLocal = 0x04034b50;
  static constexpr int64_t kEndBytes = 22, kLocatorBytes = 20;

  [[noreturn]] void fail(int64_t at, std::string_view reason) const {
    throw CorruptFile(concat(path_, ", byte ", at, ": ", reason, "; download it again"));
  }
  uint64_t read(int64_t at, int num_bytes) const {
    if (at < 0 || at > file_.num_bytes() - num_bytes) fail(at, "breaks off");
    uint64_t number = 0;
    std::memcpy(&number, file_.bytes().data() + at, static_cast<size_t>(num_bytes));
    return number;
  }
  // Of a field that is no more than the file is long.
  int64_t read_size(int64_t at, int num_bytes) const {
    const uint64_t size = read(at, num_bytes);
    if (size > static_cast<uint64_t>(file_.num_bytes())) fail(at, "a size beyond the file's");
    return static_cast<int64_t>(size);
  }

  // Where its entries begin, and how many there are.
  std::pair<int64_t, int64_t> find_directory() const {
    constexpr int64_t kMaxComment = 65535;
    const int64_t last = file_.num_bytes() - kEndBytes;
    for (int64_t at = last; at >= 0 && at >= last - kMaxComment; --at) {
      if (read(at, 4) != kEnd) continue;
      if (at >= kLocatorBytes && read(at - kLocatorBytes, 4) == kLocator64) {
        const int64_t end = read_size(at - kLocatorBytes + 8, 8);
        if (read(end, 4) != kEnd64) fail(end, "no end of a directory");
        return {read_size(end + 48, 8), read_size(end + 32, 8)};
      }
      return {read_size(at + 16, 4), read_size(at + 10, 2)};
    }
    fail(0, "no zip file, as torch.save has written since its version 1.6");
  }

  int64_t read_entry(int64_t at, std::map<std::string, Record, std::less<>>& found) const {
    if (read(at, 4) != kEntry) fail(at, "no entry of the directory");
    if (read(at + 10, 2) != 0)
      throw NotSupported(concat(path_, ": its records are compressed; save it again by torch"));
    const auto name_bytes = static_cast<int64_t>(read(at + 28, 2));
    const auto extra_bytes = static_cast<int64_t>(read(at + 30, 2));
    const auto comment_bytes = static_cast<int64_t>(read(at + 32, 2));
    const int64_t next = at + 46 + name_bytes + extra_bytes + comment_bytes;
    if (next > file_.num_bytes()) fail(at, "breaks off");
    const std::string name(
        file_.text().substr(static_cast<size_t>(at) + 46, static_cast<size_t>(name_bytes)));
    uint64_t packed_bytes = read(at + 20, 4);
    uint64_t num_bytes = read(at + 24, 4);
    uint64_t local = read(at + 42, 4);
    read_long_sizes(at + 46 + name_bytes, extra_bytes, {&num_bytes, &packed_bytes, &local});
    const auto size = static_cast<uint64_t>(file_.num_bytes());
    if (local > size || num_bytes > size) fail(at, "a record beyond the file");
    const auto begin = static_cast<int64_t>(local);
    if (read(begin, 4) != kLocal) fail(begin, "no record");
    const int64_t data = begin + 30 + static_cast<int64_t>(read(begin + 26, 2)) +
                         static_cast<int64_t>(read(begin + 28, 2));
    const auto length = static_cast<int64_t>(num_bytes);
    if (length > file_.num_bytes() - data) fail(begin, "the record leaves the file");
    if (found.size() == kMaxRecords)
      throw NotSupported(concat(path_, ": has more than ", kMaxRecords, " records"));
    if (!found.emplace(name, Record{data, length}).second) fail(at, "a record comes twice");
    return next;
  }

  // Sizes of 8 bytes, of those fields that 4 do not hold, in order.
  void read_long_sizes(int64_t at, int64_t num_bytes,
                       std::initializer_list<uint64_t*> fields) const {
    constexpr uint64_t kLong = 0xffffffff;
    const int64_t end = at + num_bytes;
    while (at + 4 <= end) {
      const uint64_t id = read(at, 2);
      int64_t next = at + 4;
      at = next + static_cast<int64_t>(read(at + 2, 2));
      if (id != 1) continue;
      for (uint64_t* const field : fields) {
        if (*field != kLong) continue;
        if (next + 8 > std::min(at, end)) fail(next, "lacks a size");
        *field = read(next, 8);
        next += 8;
      }
    }
  }

  const MappedFile& file_;
  const std::string path_;
};

// Row-major, one element behind another.
bool is_contiguous(const PickledTensor& tensor) {
  int64_t stride = 1;
  for (size_t d = tensor.shape.size(); d-- > 0;) {
    if (tensor.shape[d] != 1 && tensor.strides[d] != stride) return false;
    if (__builtin_mul_overflow(stride, tensor.shape[d], &stride)) return false;
  }
  return true;
}

TensorEntry entry_of(const PickledTensor& tensor, const Record& values, const std::string& path) {
  const auto fail = [&](std::string_view reason) {
    throw CorruptFile(concat(path, ": tensor \"", tensor.name, "\": ", reason));
  };
  TensorEntry entry{.name = tensor.name, .dtype = tensor.dtype};
  if (tensor.shape.size() > TensorShape::kMaxDims || tensor.strides.size() != tensor.shape.size())
    fail("has a shape that no layer reads");
  if (!is_contiguous(tensor))
    throw NotSupported(concat(path, ": tensor \"", tensor.name,
                              "\" does not lie row by row; save its contiguous() copy"));
  int64_t num_bytes = size_bytes(tensor.dtype);
  for (const int64_t dim : tensor.shape) {
    entry.shape.push_back(dim);
    if (__builtin_mul_overflow(num_bytes, dim, &num_bytes)) fail("is too large");
  }
  int64_t begin = 0;
  if (tensor.offset < 0 ||
      __builtin_mul_overflow(tensor.offset, size_bytes(tensor.dtype), &begin) ||
      num_bytes > values.num_bytes || begin > values.num_bytes - num_bytes)
    fail("leaves the record of its values");
  entry.offset = values.offset + begin;
  entry.num_bytes = num_bytes;
  return entry;
}

}  // namespace

std::vector<TensorEntry> read_torch_file(const MappedFile& file) {
  const std::string path = file.path().string();
  const auto records = ZipReader(file).records();
  // All records lie in one folder, whose name is the file's when it was saved.
  constexpr std::string_view kPickle = "/data.pkl";
  std::string folder;
  for (const auto& [name, record] : records)
    if (name.ends_with(kPickle)) folder = name.substr(0, name.size() - kPickle.size());
  const auto pickle = records.find(folder + std::string(kPickle));
  if (pickle == records.end())
    throw NotSupported(concat(path, ": has no data.pkl; it was not written by torch.save"));
  const auto bytes_of = [&](const Record& record) {
    return file.bytes().subspan(static_cast<size_t>(record.offset),
                                static_cast<size_t>(record.num_bytes));
  };
  if (const auto order = records.find(folder + "/byteorder"); order != records.end()) {
    const auto bytes = bytes_of(order->second);
    if (std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()) == "big")
      throw NotSupported(concat(path, ": was written by a big-endian machine"));
  }
  std::vector<TensorEntry> tensors;
  for (const PickledTensor& tensor : read_pickled_tensors(bytes_of(pickle->second), path)) {
    const auto values = records.find(folder + "/data/" + tensor.storage);
    if (values == records.end())
      throw CorruptFile(concat(path, ": tensor \"", tensor.name, "\": its values are not there"));
    tensors.push_back(entry_of(tensor, values->second, path));
  }
  return tensors;
}

}  // namespace llmserve
