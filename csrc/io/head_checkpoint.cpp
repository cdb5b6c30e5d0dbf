#include "io/head_checkpoint.h"

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "io/json.h"
#include "io/mapped_file.h"
#include "io/safetensors.h"
#include "io/torch_file.h"

namespace llmserve {
namespace {

constexpr std::string_view kTorchFiles[] = {"medusa_lm_head.pt", "pytorch_model.bin"};

struct PrefixRow {
  std::string_view from;
  std::string_view to;
};
// Of EAGLE's first heads, as `speculators` has them.
constexpr PrefixRow kPrefixes[] = {{"fusion_fc.", "fc."}, {"transformer.", "layers.0."}};

std::string_view torch_file_of(const CheckpointDirectory& directory) {
  if (!directory.weights_file().empty() || is_safetensors(directory)) return {};
  for (const std::string_view name : kTorchFiles)
    if (directory.contains(name)) return name;
  return {};
}

Checkpoint open_torch(const CheckpointDirectory& directory, std::string_view name) {
  const auto config = directory.map("config.json");
  const auto file = directory.map(name);
  return {"torch",
          directory.path().string(),
          JsonDocument::parse(config->path().string(), config->text()),
          {file},
          read_torch_file(*file)};
}

Checkpoint open_any(const std::string& path) {
  const CheckpointDirectory directory(path);
  const std::string_view name = torch_file_of(directory);
  return name.empty() ? open_checkpoint(path) : open_torch(directory, name);
}

// The same files under other names.
Checkpoint renamed(const Checkpoint& checkpoint) {
  std::vector<std::shared_ptr<const MappedFile>> files(checkpoint.files().begin(),
                                                       checkpoint.files().end());
  std::vector<TensorEntry> tensors(checkpoint.tensors().begin(), checkpoint.tensors().end());
  for (TensorEntry& tensor : tensors)
    for (const auto& [from, to] : kPrefixes)
      if (tensor.name.starts_with(from)) tensor.name.replace(0, from.size(), to);
  Checkpoint other(checkpoint.format(), checkpoint.path(), checkpoint.config(), std::move(files),
                   std::move(tensors));
  other.set_quantization(checkpoint.quantization());
  return other;
}

}  // namespace

Checkpoint open_head_checkpoint(const std::string& path) {
  Checkpoint checkpoint = open_any(path);
  const JsonNode kind = JsonNode(checkpoint.config())["speculators_model_type"];
  const bool is_eagle = !kind.is_null() && kind.as_string() == "eagle";
  return is_eagle ? renamed(checkpoint) : std::move(checkpoint);
}

}  // namespace llmserve
