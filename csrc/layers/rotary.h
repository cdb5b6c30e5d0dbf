// Rotary position embedding: the step's tables of angles.
#pragma once

#include <utility>
#include <vector>

#include "layers/forward_context.h"

namespace llmserve {

// A step's cos_sin [T, d], in the arena; none: no rotation. One table serves both unless queries
// are scaled by their positions.
struct RotaryTables {
  ConstTensor queries;
  ConstTensor keys;
  bool are_one() const { return queries.data == keys.data; }
};

// Queries are multiplied by 1 + growth * ln(1 + floor(position / period)).
struct QueryScaling {
  float growth = 0.0f;  // 0: they are not
  int32_t period = 1;
};

class Rotary {
 public:
  // inv_freq [d / 2]: see models/rope.h.
  Rotary(std::vector<float> inv_freq, float attention_factor, QueryScaling query_scaling = {})
      : inv_freq_(std::move(inv_freq)),
        attention_factor_(attention_factor),
        query_scaling_(query_scaling) {}

  int64_t rotary_dim() const { return 2 * static_cast<int64_t>(inv_freq_.size()); }

  // Of the step's positions, in the arena scope of the caller; every layer reads them.
  RotaryTables make_tables(const ForwardContext& context) const {
    const Tensor keys = make_table(context, {});
    return {has_query_table() ? make_table(context, query_scaling_) : keys, keys};
  }
  int64_t workspace_bytes(int64_t num_tokens) const {
    return (has_query_table() ? 2 : 1) *
           Arena::footprint_bytes(DType::kF32, {num_tokens, rotary_dim()});
  }

 private:
  bool has_query_table() const { return query_scaling_.growth != 0.0f; }
  Tensor make_table(const ForwardContext& context, const QueryScaling& scaling) const {
    const Tensor cos_sin =
        context.arena.allocate(DType::kF32, {context.input.num_tokens(), rotary_dim()});
    context.backend.rotary_table({.positions = context.input.positions,
                                  .inv_freq = inv_freq_,
                                  .scale = attention_factor_,
                                  .growth = scaling.growth,
                                  .period = scaling.period,
                                  .cos_sin = cos_sin});
    return cos_sin;
  }

  std::vector<float> inv_freq_;
  float attention_factor_;
  QueryScaling query_scaling_;
};

}  // namespace llmserve
