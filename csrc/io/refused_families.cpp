#include "io/refused_families.h"

namespace llmserve {
namespace {

struct RefusedRow {
  std::string_view name;
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
    {"glm-dsa", kSparseIndexer},
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
    {"kimi-linear", kDeltaAttention},
    {"Llama4ForCausalLM", kChunks},
    {"Llama4ForConditionalGeneration", kChunks},
    {"llama4", kChunks},
    {"llama4_text", kChunks},
};

}  // namespace

std::string_view refused_family(std::string_view name) {
  for (const RefusedRow& row : kRefused)
    if (row.name == name) return row.reason;
  return {};
}

}  // namespace llmserve
