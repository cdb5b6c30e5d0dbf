#include "io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "core/error.h"
#include "io/json_reader.h"
#include "io/quantization_files.h"
#include "io/text_part.h"

namespace llmserve {
namespace {

constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kMedusaFile = "medusa_lm_head.safetensors";  // heads that draft
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

// The format's own bound on the header, and ours on the index.
constexpr int64_t kMaxHeaderBytes = 100'000'000;
constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMinEntryBytes = 50;  // "":{"dtype":"I8","shape":[],"data_offsets":[0,0]},
constexpr size_t kMaxNameBytes = 4096;  // names go into messages

struct DTypeRow {
  std::string_view name;
  std::optional<DType> dtype;  // none: a type of the format that no layer reads
};
constexpr DTypeRow kDTypes[] = {
    {"F32", DType::kF32},      {"BF16", DType::kBF16},      {"F16", DType::kF16},
    {"F64", DType::kF64},      {"I8", DType::kI8},          {"U8", DType::kU8},
    {"I16", DType::kI16},      {"I32", DType::kI32},        {"I64", DType::kI64},
    {"BOOL", DType::kBool},    {"F8_E4M3", DType::kF8E4M3}, {"F8_E5M2", DType::kF8E5M2},
    {"U16", std::nullopt},     {"U32", std::nullopt},       {"U64", std::nullopt},
    {"C64", std::nullopt},     {"F4", std::nullopt},        {"F6_E2M3", std::nullopt},
    {"F6_E3M2", std::nullopt}, {"F8_E8M0", DType::kU8},  // exponents, which are read as bytes
};

class HeaderParser {
 public:
  // Appends to `entries`.
  HeaderParser(const MappedFile& file, int32_t file_idx, std::string_view header,
               std::vector<TensorEntry>& entries)
      : path_(file.path().string()),
        file_idx_(file_idx),
        data_begin_(kLengthBytes + static_cast<int64_t>(header.size())),
        data_bytes_(file.num_bytes() - data_begin_),
        reader_(path_, header, kLengthBytes),
        entries_(entries) {}

  void parse() {
    const size_t first = entries_.size();
    std::string key;
    bool has_metadata = false;
    for (reader_.begin_object(); reader_.next_key(key);) {
      if (key == "__metadata__") {
        if (std::exchange(has_metadata, true)) reader_.fail("the key \"__metadata__\" comes twice");
        read_metadata();
      } else {
        entries_.push_back(read_entry(key));
      }
    }
    reader_.end();
    check_tiling(std::span(entries_).subspan(first));
  }

 private:
  void read_metadata() {
    std::string key;
    for (reader_.begin_object(); reader_.next_key(key);) reader_.read_string();
  }

  TensorEntry read_entry(const std::string& tensor_name) {
    if (tensor_name.size() > kMaxNameBytes)
      reader_.fail(concat("a tensor's name is ", tensor_name.size(), " bytes long, at most ",
                          kMaxNameBytes, " are read"));
    TensorEntry entry;
    entry.name = tensor_name;
    entry.file_idx = file_idx_;
    bool has_dtype = false;
    bool has_shape = false;
    bool has_offsets = false;
    std::string key;
    for (reader_.begin_object(); reader_.next_key(key);) {
      if (key == "dtype") {
        if (std::exchange(has_dtype, true)) fail(entry, "has two dtypes");
        entry.dtype = read_dtype(entry);
      } else if (key == "shape") {
        if (std::exchange(has_shape, true)) fail(entry, "has two shapes");
        read_shape(entry);
      } else if (key == "data_offsets") {
        if (std::exchange(has_offsets, true)) fail(entry, "has two data_offsets");
        read_offsets(entry);
      } else {
        reader_.skip();
      }
    }
    if (!has_dtype || !has_shape || !has_offsets) fail(entry, "lacks dtype, shape or data_offsets");
    check_size(entry);
    return entry;
  }

  DType read_dtype(const TensorEntry& entry) {
    const std::string dtype_name = reader_.read_string();
    for (const DTypeRow& row : kDTypes) {
      if (row.name != dtype_name) continue;
      if (row.dtype) return *row.dtype;
      throw NotSupported(concat(path_, ": tensor \"", entry.name, "\" has dtype ", dtype_name,
                                ", which llmserve does not read; convert it to F32 or BF16"));
    }
    fail(entry, concat("has the unknown dtype \"", dtype_name.substr(0, 32), "\""));
  }

  void read_shape(TensorEntry& entry) {
    for (reader_.begin_array(); reader_.next_element();) {
      const int64_t dim = reader_.read_int();
      if (dim < 0) fail(entry, concat("has a negative dimension ", dim));
      if (entry.shape.size() == TensorShape::kMaxDims) {
        throw NotSupported(concat(path_, ": tensor \"", entry.name, "\" has more than ",
                                  TensorShape::kMaxDims, " dimensions, which no layer reads"));
      }
      entry.shape.push_back(dim);
    }
  }

  void read_offsets(TensorEntry& entry) {
    int64_t offsets[2] = {0, 0};
    int count = 0;
    for (reader_.begin_array(); reader_.next_element(); ++count) {
      const int64_t offset = reader_.read_int();
      if (count < 2) offsets[count] = offset;
    }
    if (count != 2) fail(entry, concat("data_offsets: expected 2 numbers, got ", count));
    const auto [begin, end] = offsets;
    if (begin < 0 || end < begin || end > data_bytes_)
      fail(entry, concat("data_offsets [", begin, ", ", end, "] leave the file, which holds ",
                         data_bytes_, " bytes of data; it may be truncated: download it again"));
    entry.offset = data_begin_ + begin;
    entry.num_bytes = end - begin;
  }

  void check_size(const TensorEntry& entry) {
    int64_t bytes = size_bytes(entry.dtype);
    bool overflows = false;
    for (const int64_t dim : entry.shape) overflows |= __builtin_mul_overflow(bytes, dim, &bytes);
    if (overflows || bytes != entry.num_bytes)
      fail(entry, concat(describe(entry), " takes ", overflows ? "too many" : concat(bytes),
                         " bytes, but its data_offsets hold ", entry.num_bytes));
  }

  // In order of offset, in which it leaves them, each tensor begins where the one before ends, from
  // the first byte of the data to the last.
  void check_tiling(std::span<TensorEntry> entries) {
    std::ranges::sort(entries, {}, [](const TensorEntry& entry) {
      return std::pair(entry.offset, entry.num_bytes);
    });
    int64_t expected = data_begin_;
    for (const TensorEntry& entry : entries) {
      if (entry.offset != expected)
        fail(entry, concat(entry.offset < expected ? "overlaps the tensor before it"
                                                   : "leaves a hole before it",
                           ": begins at byte ", entry.offset, " of the file, expected ", expected));
      expected += entry.num_bytes;
    }
    if (expected != data_begin_ + data_bytes_)
      throw CorruptFile(concat(path_, ", byte ", expected, ": ",
                               data_begin_ + data_bytes_ - expected, " bytes belong to no tensor"));
  }

  [[noreturn]] void fail(const TensorEntry& entry, std::string_view reason) const {
    throw CorruptFile(concat(path_, ": tensor \"", entry.name, "\": ", reason));
  }

  const std::string path_;
  const int32_t file_idx_;
  const int64_t data_begin_;
  const int64_t data_bytes_;
  JsonReader reader_;
  std::vector<TensorEntry>& entries_;
};

// The header's JSON, once its length has been checked.
std::string_view header_of(const MappedFile& file) {
  const std::string path = file.path().string();
  if (file.num_bytes() < kLengthBytes)
    throw CorruptFile(concat(path, ": is ", file.num_bytes(),
                             " bytes long, too short for a safetensors file; download it again"));
  uint64_t header_bytes = 0;  // little-endian, as every supported machine is
  std::memcpy(&header_bytes, file.bytes().data(), kLengthBytes);
  const uint64_t available =
      static_cast<uint64_t>(std::min(kMaxHeaderBytes, file.num_bytes() - kLengthBytes));
  if (header_bytes > available)
    throw CorruptFile(concat(path, ", byte 0: the header claims ", header_bytes, " bytes, at most ",
                             available,
                             " are possible; the file may be truncated or not safetensors"));
  return file.text().substr(kLengthBytes, header_bytes);
}

// Every tensor of the files. Room for all is made at once, so that the list never grows by copying.
// Calls visit(reader, tensor, file name) for each tensor of the index.
template <class Visit>
void read_index(const MappedFile& file, Visit visit) {
  const std::string path = file.path().string();
  if (file.num_bytes() > kMaxHeaderBytes)
    throw CorruptFile(concat(path, ": is ", file.num_bytes(), " bytes long; at most ",
                             kMaxHeaderBytes, " are read"));
  JsonReader reader(path, file.text());
  std::string key;
  bool has_map = false;
  bool is_empty = true;
  for (reader.begin_object(); reader.next_key(key);) {
    if (key != "weight_map") {
      reader.skip();
      continue;
    }
    if (std::exchange(has_map, true)) reader.fail("the key \"weight_map\" comes twice");
    std::string tensor;
    for (reader.begin_object(); reader.next_key(tensor); is_empty = false) {
      visit(reader, tensor, reader.read_string());
    }
  }
  reader.end();
  if (is_empty)
    throw CorruptFile(concat(path, ": weight_map: expected at least one tensor, got none"));
}

struct Shards {
  std::vector<std::shared_ptr<const MappedFile>> files;  // in order of first use
  std::map<std::string, int32_t> ids;                    // by name
};

// Each is opened as soon as it is named, so that an index cannot name more than there are.
Shards map_shards(const CheckpointDirectory& directory, const MappedFile& index) {
  Shards shards;
  read_index(index, [&](JsonReader&, const std::string&, const std::string& shard) {
    if (shards.ids.contains(shard)) return;
    shards.files.push_back(directory.map(shard));
    shards.ids.emplace(shard, static_cast<int32_t>(shards.files.size()) - 1);
  });
  return shards;
}

// Every tensor of the index is in the file that it says, and comes once; and there are no others.
void check_index(const MappedFile& index, const Shards& shards, const Checkpoint& checkpoint) {
  std::vector<bool> is_listed(checkpoint.tensors().size(), false);
  read_index(index, [&](JsonReader& reader, const std::string& tensor, const std::string& shard) {
    const TensorEntry* entry = checkpoint.find(tensor);
    if (entry == nullptr || entry->file_idx != shards.ids.at(shard))
      throw CorruptFile(concat(index.path().string(), ": weight_map: tensor \"",
                               tensor.substr(0, kMaxNameBytes), "\" should be in ", shard,
                               ", which does not have it"));
    const size_t idx = static_cast<size_t>(entry - checkpoint.tensors().data());
    if (is_listed[idx]) reader.fail(concat("the tensor \"", tensor, "\" comes twice"));
    is_listed[idx] = true;
  });
  for (size_t i = 0; i < is_listed.size(); ++i) {
    const TensorEntry& entry = checkpoint.tensors()[i];
    if (!is_listed[i])
      throw CorruptFile(concat(checkpoint.file(entry)->path().string(), ": tensor \"", entry.name,
                               "\" is not in the weight_map of ", index.path().string(),
                               "; the files may belong to different versions of the model"));
  }
}

// The one file that has all weights, or none.
std::string_view single_file(const CheckpointDirectory& directory) {
  if (!directory.weights_file().empty()) return directory.weights_file();
  for (const std::string_view name : {kSingleFile, kMedusaFile})
    if (directory.contains(name)) return name;
  return {};
}

Checkpoint open_single(const CheckpointDirectory& directory, JsonDocument config) {
  std::vector<std::shared_ptr<const MappedFile>> files{directory.map(single_file(directory))};
  std::vector<TensorEntry> tensors = read_safetensors_headers(files);
  return Checkpoint("safetensors", directory.path().string(), std::move(config), std::move(files),
                    std::move(tensors));
}

Checkpoint open_sharded(const CheckpointDirectory& directory, JsonDocument config) {
  const auto index = directory.map(kIndexFile);
  const Shards shards = map_shards(directory, *index);
  Checkpoint checkpoint("safetensors", directory.path().string(), std::move(config), shards.files,
                        read_safetensors_headers(shards.files));
  check_index(*index, shards, checkpoint);
  return checkpoint;
}

}  // namespace

std::vector<TensorEntry> read_safetensors_headers(
    std::span<const std::shared_ptr<const MappedFile>> files) {
  int64_t max_num_tensors = 0;
  for (const auto& file : files) {
    const std::string_view header = header_of(*file);
    max_num_tensors +=
        std::min<int64_t>(std::ranges::count(header, '{'), std::ssize(header) / kMinEntryBytes + 1);
  }
  std::vector<TensorEntry> tensors;
  tensors.reserve(static_cast<size_t>(max_num_tensors));
  for (size_t i = 0; i < files.size(); ++i) {
    HeaderParser(*files[i], static_cast<int32_t>(i), header_of(*files[i]), tensors).parse();
  }
  return tensors;
}

std::vector<std::pair<std::string, std::string>> read_safetensors_metadata(const MappedFile& file) {
  std::vector<std::pair<std::string, std::string>> metadata;
  JsonReader reader(file.path().string(), header_of(file), kLengthBytes);
  std::string key;
  for (reader.begin_object(); reader.next_key(key);) {
    if (key != "__metadata__") {
      reader.skip();
      continue;
    }
    for (reader.begin_object(); reader.next_key(key);)
      metadata.emplace_back(key, reader.read_string());
  }
  return metadata;
}

bool is_safetensors(const CheckpointDirectory& directory) {
  if (!directory.weights_file().empty()) return directory.weights_file().ends_with(".safetensors");
  return !single_file(directory).empty() || directory.contains(kIndexFile);
}

Checkpoint open_safetensors(const CheckpointDirectory& directory) {
  const auto config_file = directory.map("config.json");
  const std::string& own = directory.config_text();
  JsonDocument config = JsonDocument::parse(
      config_file->path().string(), own.empty() ? config_file->text() : std::string_view(own));
  const bool is_single = !single_file(directory).empty();
  std::optional<JsonDocument> quantization = read_quantization(config, &directory);
  Checkpoint checkpoint = is_single ? open_single(directory, std::move(config))
                                    : open_sharded(directory, std::move(config));
  checkpoint.set_quantization(std::move(quantization));
  return take_text_part(std::move(checkpoint));
}

}  // namespace llmserve
