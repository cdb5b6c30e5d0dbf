// A language model: tokens in, logits out, written once against Backend.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "layers/forward_context.h"
#include "layers/kv_place.h"
#include "layers/weight_report.h"
#include "models/model_config.h"

namespace llmserve {

// Immutable once loaded; forward() may run on one thread at a time, because the backend's pool and
// the arena do.
class Model {
 public:
  explicit Model(ModelConfig config) : config_(std::move(config)) {}
  virtual ~Model() = default;

  const ModelConfig& config() const { return config_; }
  // What the weights take, by group, and the checkpoint's tensors that no layer asked for.
  const WeightReport& weights() const { return weights_; }

  std::span<const CacheGroupSpec> cache_groups() const { return config_.cache_groups; }
  std::span<const KvPlace> kv_places() const { return config_.kv_places; }  // [layers]
  int64_t kv_bytes_per_token(DType dtype) const;

  // Runs the step's tokens through all layers, storing keys and values in context.kv_caches and the
  // states of input.wanted_layers in context.layer_states, where one more than the number of layers
  // stands for what leaves the final norm. Returns the final-normed hidden states
  // [T, E] f32, in the arena scope of the caller. Throws NotSupported where a group has ranks, or
  // a sequence an adapter or a state, that the model cannot use.
  virtual Tensor forward(const ForwardContext& context) const = 0;

  // out [T, E] = what the first layer reads of the step's tokens, without their positions.
  virtual void embed(const ForwardContext& context, const Tensor& out) const = 0;

  // Logits [rows.size(), V] f32 of chosen tokens of `hidden` [T, E], in the arena scope of the
  // caller. `rows` may be any part of input.logit_rows: large sets can go in chunks.
  virtual Tensor compute_logits(const ForwardContext& context, const ConstTensor& hidden,
                                std::span<const int32_t> rows) const = 0;

  // The arena's peak, exactly, of a forward() of max_tokens tokens and one compute_logits() of
  // max_logit_rows rows within the same scope. Fewer of either never need more.
  virtual int64_t workspace_bytes(int64_t max_tokens, int64_t max_logit_rows) const = 0;

 protected:
  // Once all are loaded.
  void set_weights(WeightReport weights) { weights_ = std::move(weights); }

 private:
  ModelConfig config_;
  WeightReport weights_;
};

}  // namespace llmserve
