#include "models/decoder.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "layers/attention_order.h"
#include "models/decoder_parts.h"
#include "models/layer_kinds.h"
#include "models/skipped_tensors.h"

namespace llmserve {
namespace {

const LayerTraits& traits(const ModelConfig& config, int64_t layer_idx) {
  return config.layers[static_cast<size_t>(layer_idx)];
}

// A norm of the layer, if the model has it.
std::optional<Norm> layer_norm(WeightLoader& weights, const ModelConfig& config, int64_t layer_idx,
                               const std::string& name) {
  if (name.empty()) return std::nullopt;
  return Norm(weights, layer_prefix(config, layer_idx) + name, config.hidden_size, config.norm);
}

std::vector<DecoderLayer> make_layers(WeightLoader& weights, const ModelConfig& config,
                                      const LayerRange& range) {
  std::vector<DecoderLayer> layers;
  for (int64_t i = range.begin; i < range.end_of(config.num_layers); ++i)
    layers.emplace_back(weights, config, i);
  return layers;
}

std::optional<Embedding> make_embedding(WeightLoader& weights, const ModelConfig& config,
                                        const LayerRange& range) {
  if (!range.is_first() && !range.has_embedding) return std::nullopt;
  return Embedding(weights, config.names.embedding, config.vocab_size, config.hidden_size,
                   config.embedding_scale);
}

std::optional<LmHead> make_head(WeightLoader& weights, const ModelConfig& config) {
  return LmHead(weights, head_name(weights, config), lm_head_spec(config));
}

// [l, W, E] of the wanted layers before `layer_idx`, which a step has in order; or of none.
Tensor states_before(const ForwardContext& context, int64_t layer_idx) {
  const std::span<const int32_t> wanted = context.input.wanted_layers;
  const auto count = std::ranges::lower_bound(wanted, layer_idx) - wanted.begin();
  if (count == 0 || context.input.wanted_tokens.empty()) return {};
  return context.layer_states.slice(0, 0, count);
}

}  // namespace

DecoderLayer::DecoderLayer(WeightLoader& weights, const ModelConfig& config, int64_t layer_idx)
    : hidden_size_(config.hidden_size),
      is_parallel_(config.is_parallel),
      residual_scale_(config.residual_scale),
      attention_norm_(layer_norm(weights, config, layer_idx, config.names.attention_norm)),
      attention_(traits(config, layer_idx).attention->make(weights, config, layer_idx)),
      attention_post_norm_(
          layer_norm(weights, config, layer_idx, config.names.attention_post_norm)),
      mlp_norm_(layer_norm(weights, config, layer_idx, config.names.mlp_norm)),
      feed_forward_(traits(config, layer_idx).feed_forward->make(weights, config, layer_idx)),
      mlp_post_norm_(layer_norm(weights, config, layer_idx, config.names.mlp_post_norm)) {
  check_internal(!is_parallel_ || attention_norm_, "a parallel block has a norm before");
}

LinearInput DecoderLayer::before(const ForwardContext& context, const std::optional<Norm>& norm,
                                 const Tensor& hidden, const Tensor& normed) const {
  if (!norm) return {hidden};
  if (!is_parallel_) return norm->before_linear(context, hidden, normed);
  norm->forward(context, hidden, normed);  // two layers read it, one after hidden has changed
  return {normed};
}

template <class Run>
void DecoderLayer::add_branch(const ForwardContext& context, const std::optional<Norm>& post_norm,
                              const Tensor& hidden, const Run& run) const {
  if (!has_detour(post_norm)) return run(hidden, /*accumulate=*/true);
  const Arena::Scope scope(context.arena);
  const Tensor out = context.arena.allocate(DType::kF32, {hidden.shape[0], hidden_size_});
  run(out, /*accumulate=*/false);
  if (post_norm) post_norm->forward(context, out, out);
  context.backend.add({.out = hidden, .x = out, .scale = residual_scale_});
}

void DecoderLayer::forward(const ForwardContext& context, const RotaryTables& angles,
                           const PagedKvCache& cache, const Tensor& hidden) const {
  const Arena::Scope scope(context.arena);
  const int64_t num_tokens = hidden.shape[0];
  const Tensor normed = context.arena.allocate(DType::kF32, {num_tokens, hidden_size_});
  const LinearInput attention_in = before(context, attention_norm_, hidden, normed);
  LinearInput mlp_in = attention_in;
  if (is_parallel_ && mlp_norm_) {
    mlp_in = before(context, mlp_norm_, hidden,
                    context.arena.allocate(DType::kF32, {num_tokens, hidden_size_}));
  }
  AttentionOrder* const order = AttentionOrder::of(context);
  if (order != nullptr) order->begin_attention();
  add_branch(context, attention_post_norm_, hidden, [&](const Tensor& out, bool accumulate) {
    attention_->forward(context, attention_in, angles, cache, {out, accumulate});
  });
  if (order != nullptr) order->end_attention();
  if (!is_parallel_) mlp_in = before(context, mlp_norm_, hidden, normed);
  add_branch(context, mlp_post_norm_, hidden, [&](const Tensor& out, bool accumulate) {
    feed_forward_->forward(context, mlp_in, out, accumulate);
  });
}

int64_t DecoderLayer::workspace_bytes(int64_t num_tokens) const {
  const int64_t rows = Arena::footprint_bytes(DType::kF32, {num_tokens, hidden_size_});
  const auto branch = [&](const std::optional<Norm>& post_norm, int64_t bytes) {
    return has_detour(post_norm) ? rows + bytes : bytes;
  };
  return (is_parallel_ && mlp_norm_ ? 2 * rows : rows) +
         std::max(branch(attention_post_norm_, attention_->workspace_bytes(num_tokens)),
                  branch(mlp_post_norm_, feed_forward_->workspace_bytes(num_tokens)));
}

Decoder::Decoder(const ModelConfig& config, WeightLoader& weights, const LayerRange& range)
    : Model(config),
      range_(range),
      embedding_(make_embedding(weights, config, range)),
      positions_(range.is_first() ? position_embedding(weights, config) : std::nullopt),
      layers_(make_layers(weights, config, range)),
      final_norm_(range.is_last() ? std::optional(Norm(weights, config.names.final_norm,
                                                       config.hidden_size, config.norm))
                                  : std::nullopt),
      lm_head_(range.is_last() ? make_head(weights, config) : std::nullopt),
      rotaries_(make_rotaries(config)) {
  WeightReport report = weights.report();
  if (!range.is_whole()) report.unused_tensors.clear();
  std::erase_if(report.unused_tensors,
                [&](const std::string& name) { return is_skipped_tensor(config, name); });
  set_weights(std::move(report));
}

void Decoder::keep_wanted(const ForwardContext& context, int64_t layer_idx,
                          const Tensor& hidden) const {
  const std::span<const int32_t> wanted = context.input.wanted_layers;
  const auto found = std::ranges::find(wanted, layer_idx);
  if (found == wanted.end()) return;
  const Tensor states = context.layer_states.slice(0, found - wanted.begin(), 1);
  context.backend.gather_rows(
      {.x = hidden,
       .rows = context.input.wanted_tokens,
       .out = Tensor(states.data, DType::kF32, {states.shape[1], states.shape[2]})});
}

void Decoder::receive(const ForwardContext& context, const Tensor& hidden) const {
  Communicator& stages = context.groups.pp;
  stages.recv(hidden, stages.rank() - 1);
  if (const Tensor states = states_before(context, range_.begin); states.data != nullptr)
    stages.recv(states, stages.rank() - 1);
}

void Decoder::send(const ForwardContext& context, const Tensor& hidden) const {
  Communicator& stages = context.groups.pp;
  stages.send(hidden, stages.rank() + 1);
  if (const Tensor states = states_before(context, range_.end); states.data != nullptr)
    stages.send(states, stages.rank() + 1);
}

Tensor Decoder::forward(const ForwardContext& context) const {
  if (range_.is_whole()) check_groups(context.groups);
  check_internal(range_.is_whole() || context.groups.pp.world_size() > 1, "a stage has others");
  check_plain(context.input);
  check_internal(std::ssize(context.kv_caches) == config().num_layers, "one KV cache a layer");
  const Tensor hidden =
      context.arena.allocate(DType::kF32, {context.input.num_tokens(), config().hidden_size});
  const Arena::Scope scope(context.arena);
  if (range_.is_first()) embedding_->forward(context, hidden);
  if (positions_) positions_->add_to(context, hidden);
  const RotaryTableSet tables = make_tables(rotaries_, context);
  if (!range_.is_first()) receive(context, hidden);
  size_t layer_idx = static_cast<size_t>(range_.begin);
  for (const DecoderLayer& layer : layers_) {
    keep_wanted(context, static_cast<int64_t>(layer_idx), hidden);
    layer.forward(context, layer_tables(tables, config(), layer_idx), context.kv_caches[layer_idx],
                  hidden);
    ++layer_idx;
  }
  if (!final_norm_) {
    send(context, hidden);
    return hidden;
  }
  keep_wanted(context, config().num_layers, hidden);
  final_norm_->forward(context, hidden, hidden);
  keep_wanted(context, config().num_layers + 1, hidden);
  return hidden;
}

Tensor Decoder::compute_logits(const ForwardContext& context, const ConstTensor& hidden,
                               std::span<const int32_t> rows) const {
  return lm_head_->forward(context, hidden, rows);
}

int64_t Decoder::workspace_bytes(int64_t max_tokens, int64_t max_logit_rows) const {
  int64_t layer_bytes = 0;
  for (const DecoderLayer& layer : layers_)
    layer_bytes = std::max(layer_bytes, layer.workspace_bytes(max_tokens));
  for (const Rotary& rotary : rotaries_) layer_bytes += rotary.workspace_bytes(max_tokens);
  if (positions_)
    layer_bytes =
        std::max(layer_bytes, positions_->workspace_bytes(max_tokens, config().hidden_size));
  return Arena::footprint_bytes(DType::kF32, {max_tokens, config().hidden_size}) +
         std::max(layer_bytes, lm_head_ ? lm_head_->workspace_bytes(max_logit_rows) : 0);
}

std::unique_ptr<Model> build_decoder(const ModelConfig& config, WeightLoader& weights,
                                     const LayerRange& range) {
  return std::make_unique<Decoder>(config, weights, range);
}

}  // namespace llmserve
