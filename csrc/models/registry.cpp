// The table of architectures.inc, to look up in.
#include "models/registry.h"

#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/near_names.h"
#include "io/text_part.h"
#include "models/architectures.h"

namespace llmserve {
namespace {

constexpr ArchitectureRow kArchitectures[] = {
#define LLMSERVE_ARCHITECTURE(name, model_type, summary, configure) \
  {name, model_type, summary, &(configure)},
#include "models/architectures.inc"
};

// Families that stand near those above, and what they have that no layer here does.
struct RefusedRow {
  std::string_view name;  // as config.json's "architectures", or their model_type
  std::string_view reason;
};
constexpr std::string_view kSparseIndexer =
    "its attention reads the tokens that an indexer chooses (DeepSeek sparse attention)";
constexpr std::string_view kChunks =
    "most of its layers attend within chunks of the sequence, not within a window";
constexpr std::string_view kCompressedKeys =
    "its attention is over compressed keys that an indexer chooses, between hyper-connections";
constexpr std::string_view kBlockIndexer = "its attention reads the blocks that an indexer chooses";
constexpr std::string_view kDeltaAttention =
    "its attention is linear in most layers (Kimi Delta Attention)";
constexpr RefusedRow kRefused[] = {
    {"DeepseekV32ForCausalLM", kSparseIndexer},
    {"deepseek_v32", kSparseIndexer},
    {"DeepseekV4ForCausalLM", kCompressedKeys},
    {"deepseek_v4", kCompressedKeys},
    {"GlmMoeDsaForCausalLM", kSparseIndexer},
    {"glm_moe_dsa", kSparseIndexer},
    {"MiniMaxM3ForCausalLM", kBlockIndexer},
    {"MiniMaxM3VLForCausalLM", kBlockIndexer},
    {"MiniMaxM3VLForConditionalGeneration", kBlockIndexer},
    {"MiniMaxM3SparseForConditionalGeneration", kBlockIndexer},
    {"minimax_m3_vl", kBlockIndexer},
    {"KimiK3ForCausalLM", kDeltaAttention},
    {"KimiK3ForConditionalGeneration", kDeltaAttention},
    {"kimi_k3", kDeltaAttention},
    {"KimiLinearForCausalLM", kDeltaAttention},
    {"kimi_linear", kDeltaAttention},
    {"Llama4ForCausalLM", kChunks},
    {"Llama4ForConditionalGeneration", kChunks},
    {"llama4", kChunks},
    {"llama4_text", kChunks},
};

}  // namespace

std::span<const ArchitectureRow> architecture_registry() { return kArchitectures; }

const ArchitectureRow& find_architecture(std::string_view name, std::string_view where) {
  std::vector<std::string_view> known;
  for (const ArchitectureRow& row : kArchitectures) {
    if (row.name == name) return row;
    known.push_back(row.name);
  }
  for (const RefusedRow& row : kRefused)
    if (row.name == name)
      throw NotSupported(
          concat(where, ": architecture \"", name, "\" is not supported: ", row.reason));
  for (const WrapperRow& row : wrapper_registry()) known.push_back(row.name);
  const std::string near = near_names(name, known);
  throw NotSupported(concat(where, ": architecture \"", name.substr(0, 80), "\" is not supported; ",
                            near.empty() ? "" : "near it are " + near + "; ",
                            "docs/support-matrix.md has all ", known.size(), " that are"));
}

}  // namespace llmserve
