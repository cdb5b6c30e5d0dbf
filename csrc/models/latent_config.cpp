#include "models/latent_config.h"

#include <algorithm>

#include "core/error.h"
#include "models/config_fields.h"
#include "models/layer_kinds.h"

namespace llmserve {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 20;  // of all heads together, too

}  // namespace

void read_latent(const JsonNode& json, const LatentDims& absent, ModelConfig& config) {
  const auto read = [&](const char* key, int64_t fallback) {
    const JsonNode node = json[key];
    return node.is_absent() ? fallback : node.as_int(1, kMaxDim);
  };
  LatentDims& dims = config.latent;
  const JsonNode query_rank = json["q_lora_rank"];
  dims.query_rank =
      query_rank.is_absent() ? absent.query_rank : query_rank.as_int_or(0, 1, kMaxDim);
  dims.rank = read("kv_lora_rank", absent.rank);
  dims.plain_dim = read("qk_nope_head_dim", absent.plain_dim);
  dims.rotary_dim = read("qk_rope_head_dim", absent.rotary_dim);
  dims.value_dim = read("v_head_dim", absent.value_dim);
  if (dims.rotary_dim % 2 != 0)
    json["qk_rope_head_dim"].fail(
        concat("expected an even number of rotated elements, got ", dims.rotary_dim));
  const int64_t widest = std::max({dims.query_dim(), dims.row_dim(), dims.value_dim});
  if (config.num_heads * widest > kMaxDim)
    json["num_attention_heads"].fail(concat("expected heads of ", widest, " elements, up to ",
                                            kMaxDim, " together, got ", config.num_heads));
  require(json["attention_bias"], false);
  if (json["has_split_kv_b"].as_bool_or(false)) {  // GGUF
    config.names.k_b = "self_attn.k_b_proj";
    config.names.v_b = "self_attn.v_b_proj";
  }
  config.num_kv_heads = config.num_heads;
  config.head_dim = dims.rotary_dim;
  for (LayerTraits& layer : config.layers) layer.attention = &kLatentAttention;
}

}  // namespace llmserve
