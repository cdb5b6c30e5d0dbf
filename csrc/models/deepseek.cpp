// DeepSeek-V3 and what has its attention: latents that all heads share, rotated by neighbours.
// DeepSeek-AI 2024; Youtu-LLM is the same with dense layers: Tencent 2025.
#include "models/architectures.h"
#include "models/latent_config.h"

namespace llmserve {
namespace {

constexpr LatentDims kV3{
    .query_rank = 1536, .rank = 512, .plain_dim = 128, .rotary_dim = 64, .value_dim = 128};

}  // namespace

void configure_youtu(const JsonNode& json, ModelConfig& config) {
  read_latent(json, kV3, config);
  config.is_rope_interleaved = json["rope_interleave"].as_bool_or(true);
  if (json["tie_word_embeddings"].is_null()) config.tie_word_embeddings = true;
  if (config.intermediate_size == 0) config.intermediate_size = 6144;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 131072;
}

}  // namespace llmserve
