// How configs spell multi-head latent attention.
#pragma once

#include "io/json.h"
#include "models/model_config.h"

namespace llmserve {

// Sets config.latent by q_lora_rank (null: 0), kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and
// v_head_dim, `absent` standing for absent ones, and what follows from it: latent attention in all
// layers, and the rotated width as head_dim. Throws CorruptFile or NotSupported, naming the field.
void read_latent(const JsonNode& json, const LatentDims& absent, ModelConfig& config);

}  // namespace llmserve
