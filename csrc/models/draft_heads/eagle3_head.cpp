#include "models/draft_heads/eagle3_head.h"

#include <algorithm>
#include <cmath>

#include "models/decoder_parts.h"

namespace llmserve {
namespace {

AttentionSpec attention_spec(const HeadConfig& config) {
  const ModelConfig& layer = config.layer;
  return {.hidden_size = layer.hidden_size,
          .input_size = 2 * layer.hidden_size,
          .num_heads = layer.num_heads,
          .num_kv_heads = layer.num_kv_heads,
          .head_dim = layer.head_dim,
          .qkv_bias = layer.attention_bias,
          .output_bias = layer.output_bias,
          .norm = layer.norm,
          .scale = 1.0f / std::sqrt(static_cast<float>(layer.head_dim)),
          .window = layer.layers[0].window,
          .kv_group = layer.kv_places[0].group};
}

MlpSpec mlp_spec(const HeadConfig& config) {
  return {.hidden_size = config.layer.hidden_size,
          .intermediate_size = config.layer.intermediate_size,
          .has_bias = config.layer.mlp_bias,
          .activation = config.layer.activation};
}

std::vector<Norm> state_norms(const HeadConfig& config, WeightLoader& weights) {
  std::vector<Norm> norms;
  if (config.has_input_norm)
    norms.emplace_back(weights, "model.input_norm", config.state_size(), config.layer.norm);
  if (config.has_fc_norms)
    for (size_t i = 0; i < config.target_layers.size(); ++i)
      norms.emplace_back(weights, "model.fc_norm." + std::to_string(i), config.target_hidden_size,
                         config.layer.norm);
  return norms;
}

}  // namespace

Eagle3Head::Eagle3Head(HeadConfig head, WeightLoader& weights)
    : DraftHead(std::move(head)),
      state_norms_(state_norms(config(), weights)),
      fc_(weights, WeightGroup::kMlp, {{"model.fc", config().hidden_size()}}, config().state_size(),
          {.has_bias = config().has_fc_bias, .is_gathered = true}),
      embedding_norm_(weights, config().prefix + "input_layernorm", config().hidden_size(),
                      config().layer.norm),
      feature_norm_(weights, config().prefix + "hidden_norm", config().hidden_size(),
                    config().layer.norm),
      attention_(weights, config().layer.names, config().prefix, attention_spec(config())),
      mlp_norm_(weights, config().prefix + "post_attention_layernorm", config().hidden_size(),
                config().layer.norm),
      mlp_(weights, config().layer.names, config().prefix, mlp_spec(config())),
      final_norm_(weights, "model.norm", config().hidden_size(), config().layer.norm),
      rotaries_(make_rotaries(config().layer)) {
  if (config().has_embedding)
    embedding_.emplace(weights, "model.embed_tokens", config().target_vocab_size,
                       config().hidden_size(), 1.0f);
  if (config().has_lm_head)
    lm_head_.emplace(
        weights, "lm_head",
        LmHeadSpec{.vocab_size = config().vocab_size, .hidden_size = config().hidden_size()});
  set_weights(weights.report());
}

void Eagle3Head::read_states(const ForwardContext& context, const Tensor& states,
                             const Tensor& features) const {
  if (state_norms_.empty()) return fc_.forward(context, {states}, features);
  const Arena::Scope scope(context.arena);
  const Tensor normed =
      context.arena.allocate(DType::kF32, {states.shape[0], config().state_size()});
  const int64_t width = config().state_size() / std::ssize(state_norms_);
  for (int64_t i = 0; i < std::ssize(state_norms_); ++i)
    state_norms_[static_cast<size_t>(i)].forward(context, states.slice(1, i * width, width),
                                                 normed.slice(1, i * width, width));
  fc_.forward(context, {normed}, features);
}

void Eagle3Head::forward(const ForwardContext& context, const Model& target, const Tensor& features,
                         int32_t) const {
  const Arena::Scope scope(context.arena);
  const int64_t num_rows = features.shape[0];
  const int64_t size = config().hidden_size();
  const Tensor embedded = context.arena.allocate(DType::kF32, {num_rows, size});
  const Tensor read = context.arena.allocate(DType::kF32, {num_rows, 2 * size});
  if (embedding_) {
    embedding_->forward(context, embedded);
  } else {
    target.embed(context, embedded);
  }
  embedding_norm_.forward(context, embedded, read.slice(1, 0, size));
  feature_norm_.forward(context, features, read.slice(1, size, size));
  if (config().has_normed_residual) feature_norm_.forward(context, features, features);
  const RotaryTableSet tables = make_tables(rotaries_, context);
  attention_.forward(context, {read}, layer_tables(tables, config().layer, 0), context.kv_caches[0],
                     {features, /*accumulate=*/true});
  mlp_.forward(context, mlp_norm_.before_linear(context, features, embedded), features,
               /*accumulate=*/true);
  if (config().has_normed_output) final_norm_.forward(context, features, features);
}

Tensor Eagle3Head::compute_logits(const ForwardContext& context, const Model& target,
                                  const ConstTensor& features, std::span<const int32_t> rows,
                                  int32_t) const {
  ConstTensor normed = features;
  if (!config().has_normed_output) {
    const Tensor out = context.arena.allocate(DType::kF32, {features.shape[0], features.shape[1]});
    final_norm_.forward(context, features, out);
    normed = out;
  }
  return lm_head_ ? lm_head_->forward(context, normed, rows)
                  : target.compute_logits(context, normed, rows);
}

int64_t Eagle3Head::workspace_bytes(int64_t max_rows, int64_t max_logit_rows) const {
  const int64_t size = config().hidden_size();
  const auto rows = [&](int64_t width) {
    return Arena::footprint_bytes(DType::kF32, {max_rows, width});
  };
  int64_t layer = std::max(attention_.workspace_bytes(max_rows), mlp_.workspace_bytes(max_rows));
  for (const Rotary& rotary : rotaries_) layer += rotary.workspace_bytes(max_rows);
  return std::max({rows(config().state_size()), rows(size) + rows(2 * size) + layer,
                   rows(size) + logit_bytes(config().vocab_size, size, max_logit_rows)});
}

}  // namespace llmserve
