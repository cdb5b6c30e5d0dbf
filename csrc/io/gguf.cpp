#include "io/gguf.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr int64_t kDefaultAlignment = 32;
constexpr int64_t kMaxAlignment = 1 << 20;
constexpr int kMaxArrayDepth = 4;
constexpr int64_t kMaxKeyBytes = 1024;
constexpr int64_t kMaxNameBytes = 256;
// Published files have up to a hundred entries; what is kept of one takes 48 bytes.
constexpr int64_t kMaxEntries = 4096;
// What is kept of a tensor here and in a Checkpoint takes less than twice this; a model's tensors
// have kilobytes each.
constexpr int64_t kFewTensors = 4096;
constexpr int64_t kMinBytesPerTensor = 256;
constexpr int64_t kMaxElements = int64_t{1} << 56;  // so that no count of bytes overflows

constexpr std::array<std::string_view, 13> kTypeNames{
    "uint8", "int8",   "uint16", "int16",  "uint32", "int32",  "float32",
    "bool",  "string", "array",  "uint64", "int64",  "float64"};
// 0: of no fixed size.
constexpr std::array<int64_t, 13> kTypeBytes{1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

struct IntegerType {
  uint32_t gguf_type;
  DType dtype;
};
constexpr IntegerType kIntegers[] = {
    {24, DType::kI8}, {25, DType::kI16}, {26, DType::kI32}, {27, DType::kI64}};

// Types that ggml.h has, or had once, without a row in quant/registry.cpp.
struct OtherType {
  uint32_t gguf_type;
  std::string_view name;
};
constexpr OtherType kOthers[] = {{4, "Q4_2"},        {5, "Q4_3"},        {9, "Q8_1"},
                                 {15, "Q8_K"},       {31, "Q4_0_4_4"},   {32, "Q4_0_4_8"},
                                 {33, "Q4_0_8_8"},   {36, "IQ4_NL_4_4"}, {37, "IQ4_NL_4_8"},
                                 {38, "IQ4_NL_8_8"}, {41, "Q1_0"}};

bool is_printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7f; });
}

// Walks the header, never past its end.
class Cursor {
 public:
  explicit Cursor(const MappedFile& file) : file_(file), size_(file.num_bytes()) {}

  int64_t offset() const { return at_; }
  int64_t remaining() const { return size_ - at_; }

  template <class T>
  T read(std::string_view what) {
    take(sizeof(T), what);
    T value;
    std::memcpy(&value, file_.bytes().data() + at_ - sizeof(T), sizeof(T));
    return value;
  }

  // A count that is at most `max`.
  int64_t read_count(std::string_view what, int64_t max) {
    const uint64_t count = read<uint64_t>(what);
    if (count > static_cast<uint64_t>(max))
      fail(concat(what, ": ", count, ", at most ", max, " are possible here"), 8);
    return static_cast<int64_t>(count);
  }

  std::string_view read_string(std::string_view what) {
    const uint64_t length = read<uint64_t>(what);
    if (length > static_cast<uint64_t>(remaining()))
      fail(concat(what, ": a string of ", length, " bytes, and ", remaining(),
                  " are left of the file"),
           8);
    const std::string_view text = file_.text().substr(static_cast<size_t>(at_), length);
    at_ += static_cast<int64_t>(length);
    return text;
  }

  void take(int64_t num_bytes, std::string_view what) {
    if (num_bytes > remaining())
      fail(concat(what, ": needs ", num_bytes, " bytes, and ", remaining(),
                  " are left of the file; it may be truncated: download it again"));
    at_ += num_bytes;
  }

  // `back`: how far before the current position the trouble begins.
  [[noreturn]] void fail(std::string_view reason, int64_t back = 0) const {
    throw CorruptFile(concat(file_.path().string(), ", byte ", at_ - back, ": ", reason));
  }

 private:
  const MappedFile& file_;
  const int64_t size_;
  int64_t at_ = 0;
};

uint32_t read_version(Cursor& cursor, const std::string& path) {
  if (cursor.remaining() < 24)
    cursor.fail(concat("is ", cursor.remaining(), " bytes long, too short for a GGUF file"));
  if (const auto magic = cursor.read<uint32_t>("magic"); magic != kMagic)
    cursor.fail("expected the letters GGUF; this is another kind of file", 4);
  const auto version = cursor.read<uint32_t>("version");
  if (version == 2 || version == 3) return version;
  if (version == 1 || (version & 0xffffu) == 0)
    throw NotSupported(concat(path, ": is GGUF ",
                              version == 1 ? "version 1" : "of a big-endian machine",
                              ", which is not supported; convert the model again with a current "
                              "llama.cpp"));
  cursor.fail(concat("expected GGUF version 2 or 3, got ", version), 4);
}

GgufType read_type(Cursor& cursor, std::string_view key) {
  const auto type = cursor.read<uint32_t>("type");
  if (type >= kTypeNames.size())
    cursor.fail(concat("metadata ", key, ": unknown type ", type, " (0 to 12)"), 4);
  return static_cast<GgufType>(type);
}

// Takes `count` elements.
void skip(Cursor& cursor, std::string_view key, GgufType type, int64_t count, int depth) {
  if (const int64_t bytes = kTypeBytes[static_cast<size_t>(type)]; bytes > 0) {
    if (count > cursor.remaining() / bytes)
      cursor.fail(concat("metadata ", key, ": ", count, " elements of ", name(type), ", and ",
                         cursor.remaining(), " bytes are left of the file"));
    return cursor.take(count * bytes, key);
  }
  if (type == GgufType::kArray && depth == kMaxArrayDepth)
    cursor.fail(concat("metadata ", key, ": arrays nested more than ", kMaxArrayDepth, " deep"));
  for (int64_t i = 0; i < count; ++i) {
    if (type == GgufType::kString) {
      cursor.read_string(key);
    } else {
      const GgufType inner = read_type(cursor, key);
      skip(cursor, key, inner, cursor.read_count(key, cursor.remaining()), depth + 1);
    }
  }
}

GgufValue read_value(Cursor& cursor) {
  const int64_t begin = cursor.offset();
  GgufValue value;
  value.key = cursor.read_string("metadata key");
  if (value.key.empty() || std::ssize(value.key) > kMaxKeyBytes || !is_printable(value.key))
    cursor.fail(concat("a metadata key: expected 1 to ", kMaxKeyBytes, " printable characters"),
                cursor.offset() - begin);
  value.type = read_type(cursor, value.key);
  if (value.type == GgufType::kArray) {
    value.is_array = true;
    value.type = read_type(cursor, value.key);
    value.count = cursor.read_count(value.key, cursor.remaining());
  }
  value.offset = cursor.offset();
  skip(cursor, value.key, value.type, value.count, 1);
  return value;
}

void read_storage(Cursor& cursor, const std::string& path, GgufTensor& tensor) {
  const auto type = cursor.read<uint32_t>("a tensor's type");
  tensor.format = find_quant_format(type);
  if (tensor.format) {
    tensor.dtype = tensor.format->dtype.value_or(DType::kU8);
    return;
  }
  for (const IntegerType& integer : kIntegers) {
    if (integer.gguf_type != type) continue;
    tensor.dtype = integer.dtype;
    return;
  }
  for (const OtherType& other : kOthers) {
    if (other.gguf_type == type)
      throw NotSupported(concat(path, ": tensor \"", tensor.name, "\" is of type ", other.name,
                                ", which is not supported; quantize the model to Q4_K, Q8_0 or "
                                "another type of the support matrix"));
  }
  cursor.fail(concat("tensor \"", tensor.name, "\": unknown type ", type), 4);
}

// Everything but where it lies.
GgufTensor read_tensor(Cursor& cursor, const std::string& path) {
  const int64_t begin = cursor.offset();
  GgufTensor tensor;
  tensor.name = cursor.read_string("a tensor's name");
  if (tensor.name.empty() || std::ssize(tensor.name) > kMaxNameBytes || !is_printable(tensor.name))
    cursor.fail(concat("a tensor's name: expected 1 to ", kMaxNameBytes, " printable characters"),
                cursor.offset() - begin);
  const auto rank = cursor.read<uint32_t>("a tensor's number of dimensions");
  if (rank < 1 || rank > tensor.shape.size())
    cursor.fail(concat("tensor \"", tensor.name, "\": expected 1 to 4 dimensions, got ", rank), 4);
  tensor.rank = static_cast<int>(rank);
  int64_t elements = 1;
  for (int d = tensor.rank - 1; d >= 0; --d) {
    const auto dim = cursor.read<uint64_t>("a tensor's dimension");
    if (dim < 1 || dim > static_cast<uint64_t>(kMaxElements / elements))
      cursor.fail(concat("tensor \"", tensor.name, "\": dimension ", tensor.rank - 1 - d, " is ",
                         dim, ", expected at least 1 and no more elements than a file can hold"),
                  8);
    tensor.shape[static_cast<size_t>(d)] = static_cast<int64_t>(dim);
    elements *= static_cast<int64_t>(dim);
  }
  read_storage(cursor, path, tensor);
  const int64_t row = tensor.shape[static_cast<size_t>(tensor.rank) - 1];
  if (tensor.format && row % tensor.format->block_elements != 0)
    cursor.fail(concat("tensor \"", tensor.name, "\": rows of ", row,
                       " elements are no whole blocks of ", tensor.format->name));
  tensor.num_bytes =
      tensor.format ? tensor.format->num_bytes(elements) : elements * size_bytes(tensor.dtype);
  return tensor;
}

// No two tensors share bytes; holes are padding.
void check_overlap(const std::string& path, std::span<const GgufTensor> tensors) {
  std::vector<const GgufTensor*> order;
  for (const GgufTensor& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(),
            [](const GgufTensor* a, const GgufTensor* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i]->offset < order[i - 1]->offset + order[i - 1]->num_bytes)
      throw CorruptFile(concat(path, ", byte ", order[i]->offset, ": tensor \"", order[i]->name,
                               "\" overlaps tensor \"", order[i - 1]->name, "\""));
  }
}

void read_tensors(Cursor& cursor, const MappedFile& file, int64_t count, int64_t alignment,
                  std::vector<GgufTensor>& tensors) {
  const std::string path = file.path().string();
  tensors.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    GgufTensor tensor = read_tensor(cursor, path);
    const auto offset = cursor.read<uint64_t>("a tensor's offset");
    if (offset > static_cast<uint64_t>(file.num_bytes()) ||
        offset % static_cast<uint64_t>(alignment) != 0)
      cursor.fail(concat("tensor \"", tensor.name, "\": offset ", offset,
                         ", expected a multiple of ", alignment, " within the file"),
                  8);
    tensor.offset = static_cast<int64_t>(offset);
    tensors.push_back(tensor);
  }
  const int64_t data = (cursor.offset() + alignment - 1) / alignment * alignment;
  for (GgufTensor& tensor : tensors) {
    tensor.offset += data;
    if (tensor.offset > file.num_bytes() || tensor.num_bytes > file.num_bytes() - tensor.offset)
      throw CorruptFile(concat(path, ", byte ", tensor.offset, ": tensor \"", tensor.name,
                               "\" takes ", tensor.num_bytes,
                               " bytes and leaves the file, which "
                               "has ",
                               file.num_bytes(), "; it may be truncated: download it again"));
  }
  check_overlap(path, tensors);
}

}  // namespace

std::string_view name(GgufType type) { return kTypeNames[static_cast<size_t>(type)]; }

GgufFile::GgufFile(std::shared_ptr<const MappedFile> file) : file_(std::move(file)) {
  const std::string path = file_->path().string();
  Cursor cursor(*file_);
  version_ = read_version(cursor, path);
  const int64_t most_tensors = std::max(kFewTensors, file_->num_bytes() / kMinBytesPerTensor);
  const int64_t num_tensors = cursor.read_count("number of tensors", most_tensors);
  const int64_t num_entries = cursor.read_count("number of metadata entries", kMaxEntries);
  for (int64_t i = 0; i < num_entries; ++i) {
    const GgufValue value = read_value(cursor);
    if (!keys_.emplace(value.key, metadata_.size()).second)
      cursor.fail(concat("the metadata key \"", value.key, "\" comes twice"));
    metadata_.push_back(value);
  }
  int64_t alignment = kDefaultAlignment;
  if (const GgufValue* value = find("general.alignment")) {
    alignment = integer(*value);
    if (alignment < 1 || alignment > kMaxAlignment ||
        !std::has_single_bit(static_cast<uint64_t>(alignment)))
      fail(value->key,
           concat("expected a power of two up to ", kMaxAlignment, ", got ", alignment));
  }
  read_tensors(cursor, *file_, num_tensors, alignment, tensors_);
}

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto it = keys_.find(key);
  return it == keys_.end() ? nullptr : &metadata_[it->second];
}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const {
  const auto it = std::find_if(tensors_.begin(), tensors_.end(),
                               [&](const GgufTensor& tensor) { return tensor.name == name; });
  return it == tensors_.end() ? nullptr : &*it;
}

void GgufFile::fail(std::string_view key, std::string_view reason) const {
  throw CorruptFile(concat(file_->path().string(), ": metadata ", key, ": ", reason));
}

namespace {

template <class T>
T element(const GgufFile& file, const GgufValue& value, int64_t idx) {
  T out;
  std::memcpy(&out,
              file.file()->bytes().data() + value.offset + idx * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return out;
}

void check_index(const GgufFile& file, const GgufValue& value, int64_t idx) {
  if (idx >= value.count)
    file.fail(value.key, concat("expected at least ", idx + 1, " elements, got ", value.count));
}

std::string describe(const GgufValue& value) {
  return value.is_array ? concat("an array of ", value.count, " ", name(value.type))
                        : concat("a ", name(value.type));
}

}  // namespace

bool GgufFile::boolean(const GgufValue& value, int64_t idx) const {
  check_index(*this, value, idx);
  if (value.type != GgufType::kBool)
    fail(value.key, concat("expected a bool, got ", describe(value)));
  const auto byte = element<uint8_t>(*this, value, idx);
  if (byte > 1) fail(value.key, concat("expected a bool of 0 or 1, got ", int{byte}));
  return byte == 1;
}

int64_t GgufFile::integer(const GgufValue& value, int64_t idx) const {
  check_index(*this, value, idx);
  switch (value.type) {
    case GgufType::kU8:
      return element<uint8_t>(*this, value, idx);
    case GgufType::kI8:
      return element<int8_t>(*this, value, idx);
    case GgufType::kU16:
      return element<uint16_t>(*this, value, idx);
    case GgufType::kI16:
      return element<int16_t>(*this, value, idx);
    case GgufType::kU32:
      return element<uint32_t>(*this, value, idx);
    case GgufType::kI32:
      return element<int32_t>(*this, value, idx);
    case GgufType::kI64:
      return element<int64_t>(*this, value, idx);
    case GgufType::kU64: {
      const auto number = element<uint64_t>(*this, value, idx);
      if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        fail(value.key, concat(number, " is out of range"));
      return static_cast<int64_t>(number);
    }
    default:
      fail(value.key, concat("expected an integer, got ", describe(value)));
  }
}

double GgufFile::number(const GgufValue& value, int64_t idx) const {
  check_index(*this, value, idx);
  double out = 0;
  if (value.type == GgufType::kF32) {
    out = static_cast<double>(element<float>(*this, value, idx));
  } else if (value.type == GgufType::kF64) {
    out = element<double>(*this, value, idx);
  } else {
    return static_cast<double>(integer(value, idx));
  }
  if (!std::isfinite(out)) fail(value.key, "expected a finite number");
  return out;
}

std::string_view GgufFile::string(const GgufValue& value) const {
  if (value.is_array || value.type != GgufType::kString)
    fail(value.key, concat("expected a string, got ", describe(value)));
  return string_at(value.offset);
}

void GgufFile::check_strings(const GgufValue& value) const {
  if (!value.is_array || value.type != GgufType::kString)
    fail(value.key, concat("expected an array of strings, got ", describe(value)));
}

// Checked when the header was read.
std::string_view GgufFile::string_at(int64_t offset) const {
  uint64_t length = 0;
  std::memcpy(&length, file_->bytes().data() + offset, sizeof(length));
  return file_->text().substr(static_cast<size_t>(offset) + sizeof(length), length);
}

}  // namespace llmserve
