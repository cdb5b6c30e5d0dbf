// The checkpoint formats, and what to say about a directory in none of them.
#include <algorithm>
#include <array>
#include <sstream>

#include "core/error.h"
#include "io/checkpoint.h"
#include "io/gguf.h"
#include "io/mistral_format.h"
#include "io/quantization_files.h"
#include "io/safetensors.h"
#include "io/text_part.h"

namespace llmserve {
namespace {

constexpr std::array<CheckpointFormatRow, 3> kFormats{{
    {"safetensors", "Hugging Face directory with safetensors, in one file or in shards",
     &is_safetensors, &open_safetensors},
    {"mistral", "Mistral's consolidated.safetensors beside params.json", &is_mistral_format,
     &open_mistral_format},
    {"gguf", "one file with everything in it, GGUF 2 or 3, or its splits", &is_gguf, &open_gguf},
}};

bool has_suffix(const std::string& text, std::initializer_list<std::string_view> suffixes) {
  return std::any_of(suffixes.begin(), suffixes.end(),
                     [&](std::string_view suffix) { return text.ends_with(suffix); });
}

[[noreturn]] void refuse(const CheckpointDirectory& directory) {
  const std::vector<std::string> names = directory.list();
  const std::string path = directory.path().string();
  for (const std::string& name : names) {
    if (has_suffix(name, {".bin", ".pt", ".pth", ".ckpt", ".bin.index.json"}))
      throw NotSupported(concat(
          path, ": has its weights in ", name,
          ", a pickle: reading one runs whatever code its author put there, so llmserve does not. "
          "If you trust it, convert it once: python -c \"from transformers import "
          "AutoModelForCausalLM as M; M.from_pretrained('",
          path, "').save_pretrained('converted')\""));
  }
  std::ostringstream found;
  constexpr size_t kShown = 8;  // enough to see what kind of directory it is
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) found << (i ? ", " : "") << names[i];
  if (names.size() > kShown) found << ", …";
  throw NotSupported(concat(path,
                            ": expected model.safetensors or model.safetensors.index.json beside "
                            "config.json, found ",
                            names.empty() ? std::string("nothing") : found.str()));
}

}  // namespace

std::span<const CheckpointFormatRow> checkpoint_format_registry() { return kFormats; }

Checkpoint open_checkpoint(const std::string& path, std::string config_text) {
  const CheckpointDirectory directory(path, config_text);
  for (const CheckpointFormatRow& row : kFormats) {
    if (!row.detect(directory)) continue;
    if (!config_text.empty() && row.open != &open_safetensors)
      throw NotSupported(concat(path,
                                ": hf_overrides change a config.json, and a checkpoint of "
                                "format ",
                                row.name, " has none; leave them out"));
    Checkpoint checkpoint = row.open(directory);
    checkpoint.set_config_text(std::move(config_text));
    return checkpoint;
  }
  refuse(directory);
}

Checkpoint open_config(const std::string& path) {
  const std::filesystem::path file(path);
  const std::string folder = file.has_parent_path() ? file.parent_path().string() : ".";
  const auto mapped = CheckpointDirectory(folder).map(file.filename().string());
  Checkpoint checkpoint("config", path, JsonDocument::parse(path, mapped->text()), {}, {});
  checkpoint.set_quantization(read_quantization(checkpoint.config(), nullptr));
  return take_text_part(std::move(checkpoint));
}

}  // namespace llmserve
