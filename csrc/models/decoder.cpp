#include "models/decoder.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {
namespace {

AttentionSpec attention_spec(const ModelConfig& config, int32_t window) {
  return {.hidden_size = config.hidden_size,
          .num_heads = config.num_heads,
          .num_kv_heads = config.num_kv_heads,
          .head_dim = config.head_dim,
          .qkv_bias = config.attention_bias,
          .output_bias = config.output_bias,
          .has_qk_norm = config.has_qk_norm,
          .norm_eps = config.rms_norm_eps,
          .window = window};
}

GatedMlpSpec mlp_spec(const ModelConfig& config) {
  return {.hidden_size = config.hidden_size,
          .intermediate_size = config.intermediate_size,
          .has_bias = config.mlp_bias,
          .activation = config.activation};
}

}  // namespace

DecoderLayer::DecoderLayer(WeightLoader& weights, const std::string& prefix,
                           const ModelConfig& config, int32_t window)
    : hidden_size_(config.hidden_size),
      attention_norm_(weights, prefix + ".input_layernorm.weight", config.hidden_size,
                      config.rms_norm_eps),
      attention_(weights, prefix + ".self_attn", attention_spec(config, window)),
      mlp_norm_(weights, prefix + ".post_attention_layernorm.weight", config.hidden_size,
                config.rms_norm_eps),
      mlp_(weights, prefix + ".mlp", mlp_spec(config)) {}

void DecoderLayer::forward(const ForwardContext& context, const ConstTensor& cos_sin,
                           const PagedKvCache& cache, const Tensor& hidden) const {
  const Arena::Scope scope(context.arena);
  const Tensor normed = context.arena.allocate(DType::kF32, {hidden.shape[0], hidden_size_});
  attention_norm_.forward(context, hidden, normed);
  attention_.forward(context, normed, cos_sin, cache, hidden);
  mlp_norm_.forward(context, hidden, normed);
  mlp_.forward(context, normed, hidden);
}

int64_t DecoderLayer::workspace_bytes(int64_t num_tokens) const {
  return Arena::footprint_bytes(DType::kF32, {num_tokens, hidden_size_}) +
         std::max(attention_.workspace_bytes(num_tokens), mlp_.workspace_bytes(num_tokens));
}

Decoder::Decoder(const ModelConfig& config, Parts parts, WeightReport weights)
    : Model(config, std::move(weights)), parts_(std::move(parts)) {
  for (const int32_t window : config.windows)
    kv_layers_.push_back({.num_kv_heads = config.num_kv_heads,
                          .key_dim = config.head_dim,
                          .value_dim = config.head_dim,
                          .window = window});
}

Tensor Decoder::forward(const ForwardContext& context) const {
  check_internal(context.kv_caches.size() == parts_.layers.size(), "one KV cache a layer");
  const Tensor hidden =
      context.arena.allocate(DType::kF32, {context.input.num_tokens(), config().hidden_size});
  const Arena::Scope scope(context.arena);
  parts_.embedding.forward(context, hidden);
  const Tensor cos_sin = parts_.rotary.make_table(context);
  for (size_t i = 0; i < parts_.layers.size(); ++i)
    parts_.layers[i].forward(context, cos_sin, context.kv_caches[i], hidden);
  parts_.final_norm.forward(context, hidden, hidden);
  return hidden;
}

Tensor Decoder::compute_logits(const ForwardContext& context, const ConstTensor& hidden,
                               std::span<const int32_t> rows) const {
  return parts_.lm_head.forward(context, hidden, rows);
}

int64_t Decoder::workspace_bytes(int64_t max_tokens, int64_t max_logit_rows) const {
  int64_t layer_bytes = 0;
  for (const DecoderLayer& layer : parts_.layers)
    layer_bytes = std::max(layer_bytes, layer.workspace_bytes(max_tokens));
  return Arena::footprint_bytes(DType::kF32, {max_tokens, config().hidden_size}) +
         std::max(parts_.rotary.workspace_bytes(max_tokens) + layer_bytes,
                  parts_.lm_head.workspace_bytes(max_logit_rows));
}

std::unique_ptr<Model> build_decoder(const ModelConfig& config, WeightLoader& weights) {
  const std::string table = "model.embed_tokens.weight";
  Embedding embedding(weights, table, config.vocab_size, config.hidden_size);
  std::vector<DecoderLayer> layers;
  for (int64_t i = 0; i < config.num_layers; ++i)
    layers.emplace_back(weights, concat("model.layers.", i), config,
                        config.windows[static_cast<size_t>(i)]);
  RmsNorm final_norm(weights, "model.norm.weight", config.hidden_size, config.rms_norm_eps);
  // A tied checkpoint may still carry a copy of the head.
  const std::string head = "lm_head.weight";
  if (config.tie_word_embeddings) weights.ignore(head);
  LmHead lm_head(weights, config.tie_word_embeddings ? table : head, config.vocab_size,
                 config.hidden_size);
  RopeFrequencies rope = compute_rope(config.rope, config.rotary_dim,
                                      config.max_position_embeddings, config.max_model_len);
  return std::make_unique<Decoder>(
      config,
      Decoder::Parts{std::move(embedding), std::move(layers), std::move(final_norm),
                     std::move(lm_head), Rotary(std::move(rope.inv_freq), rope.attention_factor)},
      weights.report());
}

}  // namespace llmserve
