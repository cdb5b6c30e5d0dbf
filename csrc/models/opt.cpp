// OPT: learned positions, the first of which is the table's third row, LayerNorm, a plain MLP with
// a ReLU. Zhang et al. 2022.
#include "core/error.h"
#include "models/architectures.h"

namespace llmserve {

void configure_opt(const JsonNode& json, ModelConfig& config) {
  TensorNames& names = config.names;
  names.embedding = "model.decoder.embed_tokens";
  names.positions = "model.decoder.embed_positions";
  names.final_norm = "model.decoder.final_layer_norm";
  names.layers = "model.decoder.layers.";
  names.attention_norm = "self_attn_layer_norm";
  names.mlp_norm = "final_layer_norm";
  names.attention_output = "self_attn.out_proj";
  names.gate = "";
  names.up = "fc1";
  names.down = "fc2";
  config.norm = {.kind = NormKind::kLayer, .numbers = {.eps = 1e-5f}, .has_bias = true};
  config.attention_bias = json["enable_bias"].as_bool_or(true);
  config.output_bias = config.mlp_bias = config.attention_bias;
  config.has_rope = false;
  config.position_offset = 2;
  config.num_kv_heads = config.num_heads;
  config.head_dim = 0;  // follows from the width
  config.activation = read_activation(json["activation_function"], Activation::kRelu);
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(true);
  if (config.intermediate_size == 0) config.intermediate_size = 3072;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = 2048;
  const JsonNode width = json["word_embed_proj_dim"];
  if (!width.is_null() && width.as_int(1, INT32_MAX) != config.hidden_size)
    throw NotSupported(concat(width.where(), ": embeddings of another width (", width.describe(),
                              ") than hidden_size are not supported"));
  require(json["do_layer_norm_before"], true);
  require(json["_remove_final_layer_norm"], false);
  require(json["layer_norm_elementwise_affine"], true);
}

}  // namespace llmserve
