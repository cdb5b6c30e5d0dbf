#include "models/draft_heads/eagle_head.h"

#include <algorithm>

#include "models/decoder_parts.h"

namespace llmserve {
namespace {

std::optional<Norm> find_norm(const HeadConfig& config, WeightLoader& weights,
                              const std::string& name) {
  if (name.empty()) return std::nullopt;
  return Norm(weights, name, config.hidden_size(), config.layer.norm);
}

}  // namespace

EagleLayer::EagleLayer(const HeadConfig& config, WeightLoader& weights)
    : config_(config),
      embedding_norm_(find_norm(config, weights, config.names.embedding_norm)),
      feature_norm_(find_norm(config, weights, config.names.feature_norm)),
      final_norm_(find_norm(config, weights, config.names.final_norm)),
      fc_(weights, WeightGroup::kMlp, {{config.names.fc, config.hidden_size()}},
          2 * config.hidden_size(), {.has_bias = config.has_fc_bias, .is_gathered = true}),
      layer_(weights, config.layer, config.layer_idx),
      rotaries_(make_rotaries(config.layer)) {
  if (config.has_embedding)
    embedding_.emplace(weights, config.names.embedding, config.target_vocab_size,
                       config.hidden_size(), config.layer.embedding_scale);
  if (config.has_lm_head)
    lm_head_.emplace(weights, config.names.lm_head,
                     LmHeadSpec{.vocab_size = config.vocab_size,
                                .hidden_size = config.hidden_size(),
                                .bias = "",
                                .scale = config.layer.logit_scale,
                                .soft_cap = config.layer.logit_soft_cap});
}

void EagleLayer::forward(const ForwardContext& context, const Model& target,
                         const PagedKvCache& cache, const Tensor& features) const {
  const Arena::Scope scope(context.arena);
  const int64_t num_rows = features.shape[0];
  const int64_t size = config_.hidden_size();
  const Tensor read = context.arena.allocate(DType::kF32, {num_rows, 2 * size});
  {
    const Arena::Scope embedding_scope(context.arena);
    const Tensor embedded = context.arena.allocate(DType::kF32, {num_rows, size});
    if (embedding_) {
      embedding_->forward(context, embedded);
    } else {
      target.embed(context, embedded);
    }
    const Tensor left = read.slice(1, 0, size);
    const Tensor right = read.slice(1, size, size);
    if (embedding_norm_) {
      embedding_norm_->forward(context, embedded, left);
      feature_norm_->forward(context, features, right);
    } else {
      DraftHead::copy_rows(context, embedded, left);
      DraftHead::copy_rows(context, features, right);
    }
  }
  fc_.forward(context, {read}, features);
  const RotaryTableSet tables = make_tables(rotaries_, context);
  layer_.forward(context,
                 layer_tables(tables, config_.layer, static_cast<size_t>(config_.layer_idx)), cache,
                 features);
}

Tensor EagleLayer::compute_logits(const ForwardContext& context, const Model& target,
                                  const ConstTensor& features,
                                  std::span<const int32_t> rows) const {
  ConstTensor normed = features;
  if (final_norm_) {
    const Tensor out = context.arena.allocate(DType::kF32, {features.shape[0], features.shape[1]});
    final_norm_->forward(context, features, out);
    normed = out;
  }
  return lm_head_ ? lm_head_->forward(context, normed, rows)
                  : target.compute_logits(context, normed, rows);
}

int64_t EagleLayer::workspace_bytes(int64_t max_rows, int64_t max_logit_rows) const {
  const int64_t size = config_.hidden_size();
  const auto rows = [&](int64_t width) {
    return Arena::footprint_bytes(DType::kF32, {max_rows, width});
  };
  int64_t layer = layer_.workspace_bytes(max_rows);
  for (const Rotary& rotary : rotaries_) layer += rotary.workspace_bytes(max_rows);
  return std::max(rows(2 * size) + std::max(rows(size), layer),
                  rows(size) + DraftHead::logit_bytes(config_.vocab_size, size, max_logit_rows));
}

EagleHead::EagleHead(HeadConfig head, WeightLoader& weights) : DraftHead(std::move(head)) {
  layers_.emplace_back(config(), weights);
  for (const HeadConfig& layer : config().later) layers_.emplace_back(layer, weights);
  set_weights(weights.report());
}

void EagleHead::forward(const ForwardContext& context, const Model& target, const Tensor& features,
                        int32_t place) const {
  const size_t layer = layer_of(place);
  layers_[layer].forward(context, target, context.kv_caches[layer], features);
}

Tensor EagleHead::compute_logits(const ForwardContext& context, const Model& target,
                                 const ConstTensor& features, std::span<const int32_t> rows,
                                 int32_t place) const {
  return layers_[layer_of(place)].compute_logits(context, target, features, rows);
}

int64_t EagleHead::workspace_bytes(int64_t max_rows, int64_t max_logit_rows) const {
  int64_t most = 0;
  for (const EagleLayer& layer : layers_)
    most = std::max(most, layer.workspace_bytes(max_rows, max_logit_rows));
  return most;
}

}  // namespace llmserve
