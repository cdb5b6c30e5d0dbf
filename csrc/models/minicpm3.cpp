// MiniCPM3: latent attention and dense layers, with factors on embeddings, residuals and logits. Hu
// et al. 2024 (MiniCPM), section 4; OpenBMB 2024.
#include <cmath>

#include "models/architectures.h"
#include "models/latent_config.h"

namespace llmserve {

void configure_minicpm3(const JsonNode& json, ModelConfig& config) {
  if (json["rms_norm_eps"].is_null()) config.norm.numbers.eps = 1e-5f;
  if (json["tie_word_embeddings"].is_null()) config.tie_word_embeddings = true;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 32768;
  LatentDims absent{.query_rank = 768, .rank = 256, .plain_dim = 64, .rotary_dim = 32};
  absent.value_dim = config.hidden_size / config.num_heads;
  read_latent(json, absent, config);
  // null: no such factor.
  const auto factor = [&](const char* key, double if_absent, double if_null) {
    return json[key].is_absent() ? if_absent : json[key].as_number_or(if_null, 1e-6, 1e6);
  };
  const double depth = std::sqrt(static_cast<double>(config.num_layers));
  const double width = static_cast<double>(config.hidden_size);
  config.embedding_scale = static_cast<float>(json["scale_emb"].as_number_or(12.0, 1e-6, 1e6));
  config.residual_scale = static_cast<float>(factor("scale_depth", 1.4, depth) / depth);
  config.logit_scale = static_cast<float>(factor("dim_model_base", 256.0, width) / width);
}

}  // namespace llmserve
