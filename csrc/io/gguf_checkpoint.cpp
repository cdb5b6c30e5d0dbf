// A GGUF file, or the files of a split one, as a checkpoint with a model's own names.
#include <algorithm>
#include <cstdio>

#include "core/error.h"
#include "io/gguf.h"
#include "io/gguf_architecture.h"

namespace llmserve {
namespace {

constexpr int64_t kMaxSplits = 1000;

std::vector<std::string> gguf_files(const CheckpointDirectory& directory) {
  std::vector<std::string> names = directory.list();
  std::erase_if(names, [](const std::string& name) { return !name.ends_with(".gguf"); });
  return names;
}

// The file with the metadata.
std::string find_file(const CheckpointDirectory& directory) {
  if (!directory.weights_file().empty()) return directory.weights_file();
  std::vector<std::string> names = gguf_files(directory);
  const auto is_later = [](const std::string& name) {
    return name.find("-of-") != name.npos && name.find("-00001-of-") == name.npos;
  };
  std::erase_if(names, is_later);
  if (names.empty())
    throw InvalidArgument(
        concat("model: ", directory.path().string(), " has no GGUF file, or not the first one"));
  if (names.size() > 1)
    throw InvalidArgument(concat("model: ", directory.path().string(), " has several GGUF files; ",
                                 "pass the path of one, such as ",
                                 (directory.path() / names[0]).string()));
  return names[0];
}

// "model-00002-of-00003.gguf", for the first of its kind.
std::string split_name(const std::string& first, int64_t idx, int64_t count) {
  char suffix[64];
  std::snprintf(suffix, sizeof(suffix), "-%05d-of-%05d.gguf", 1, static_cast<int>(count));
  if (!first.ends_with(suffix))
    throw CorruptFile(concat(first, ": is one of ", count,
                             " files of a split model; expected the "
                             "first of them, whose name ends in \"",
                             suffix, "\""));
  std::string name = first.substr(0, first.size() - std::string_view(suffix).size());
  std::snprintf(suffix, sizeof(suffix), "-%05d-of-%05d.gguf", static_cast<int>(idx + 1),
                static_cast<int>(count));
  return name + suffix;
}

int64_t count_splits(const GgufFile& file) {
  const GgufValue* value = file.find("split.count");
  const int64_t count = value ? file.integer(*value) : 1;
  if (count > kMaxSplits)
    file.fail("split.count", concat("expected up to ", kMaxSplits, ", got ", count));
  return std::max<int64_t>(1, count);
}

// What an attention layer's rotary rows belong to: so many heads, or 0 for other tensors.
int64_t paired_heads(const GgufArchitecture& architecture, const JsonNode& config,
                     std::string_view model_name) {
  if (!architecture.has_paired_rows) return 0;
  constexpr int64_t kMaxHeads = 1 << 20;
  if (model_name.find(".q_proj.") != model_name.npos)
    return config["num_attention_heads"].as_int(1, kMaxHeads);
  if (model_name.find(".k_proj.") != model_name.npos)
    return config["num_key_value_heads"].as_int(1, kMaxHeads);
  return 0;
}

// The few ways in which the tensors of one file are stored.
class Storages {
 public:
  uint8_t find_or_add(const TensorStorage& storage) {
    const auto it = std::find(all_.begin(), all_.end(), storage);
    if (it != all_.end()) return static_cast<uint8_t>(it - all_.begin());
    check_internal(all_.size() < 256, "formats times kinds of heads and norms are few");
    all_.push_back(storage);
    return static_cast<uint8_t>(all_.size() - 1);
  }
  std::vector<TensorStorage> take() && { return std::move(all_); }

 private:
  std::vector<TensorStorage> all_{{}};
};

TensorEntry make_entry(const GgufFile& file, const GgufTensor& tensor, int32_t file_idx,
                       const GgufArchitecture& architecture, const JsonNode& config,
                       Storages& storages) {
  TensorEntry entry;
  entry.name = model_tensor_name(architecture, tensor.name);
  if (entry.name.empty()) entry.name = tensor.name;
  entry.dtype = tensor.dtype;
  for (int d = 0; d < tensor.rank; ++d) entry.shape.push_back(tensor.shape[static_cast<size_t>(d)]);
  entry.file_idx = file_idx;
  entry.offset = tensor.offset;
  entry.num_bytes = tensor.num_bytes;
  TensorStorage storage;
  if (tensor.format && !tensor.format->dtype) storage.blocks = tensor.format;
  if (storage.blocks && tensor.rank < 2)
    throw NotSupported(
        concat(file.file()->path().string(), ": tensor \"", tensor.name,
               "\": a vector in blocks of ", storage.blocks->name,
               "; norms and biases are read as F32, F16 or BF16, as converters write "
               "them"));
  storage.paired_heads = paired_heads(architecture, config, entry.name);
  if (entry.name.ends_with("norm.weight")) storage.added = architecture.norm_added;
  entry.storage_idx = storages.find_or_add(storage);
  return entry;
}

}  // namespace

bool is_gguf(const CheckpointDirectory& directory) {
  if (!directory.weights_file().empty()) return directory.weights_file().ends_with(".gguf");
  return !gguf_files(directory).empty() && !directory.contains("model.safetensors") &&
         !directory.contains("model.safetensors.index.json");
}

GgufFile open_gguf_file(const std::string& path) {
  const CheckpointDirectory directory(path);
  return GgufFile(directory.map(find_file(directory)));
}

Checkpoint open_gguf(const CheckpointDirectory& directory) {
  const std::string name = find_file(directory);
  const GgufFile first(directory.map(name));
  const GgufArchitecture& architecture = find_gguf_architecture(first);
  const int64_t num_files = count_splits(first);
  std::vector<std::shared_ptr<const MappedFile>> files{first.file()};
  JsonDocument config = make_config(first, architecture);
  std::vector<TensorEntry> entries;
  Storages storages;
  const auto add = [&](const GgufFile& file) {
    for (const GgufTensor& tensor : file.tensors())
      entries.push_back(make_entry(file, tensor, static_cast<int32_t>(files.size()) - 1,
                                   architecture, JsonNode(config), storages));
  };
  add(first);
  for (int64_t i = 1; i < num_files; ++i) {
    const GgufFile next(directory.map(split_name(name, i, num_files)));
    files.push_back(next.file());
    add(next);
  }
  return Checkpoint("gguf", (directory.path() / name).string(), std::move(config), std::move(files),
                    std::move(entries), std::move(storages).take());
}

}  // namespace llmserve
