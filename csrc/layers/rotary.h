// Rotary position embedding: the step's table of angles.
#pragma once

#include <utility>
#include <vector>

#include "layers/forward_context.h"

namespace llmserve {

class Rotary {
 public:
  // inv_freq [d / 2]: see models/rope.h.
  Rotary(std::vector<float> inv_freq, float attention_factor)
      : inv_freq_(std::move(inv_freq)), attention_factor_(attention_factor) {}

  int64_t rotary_dim() const { return 2 * static_cast<int64_t>(inv_freq_.size()); }

  // cos_sin [T, d] of the step's positions, in the arena scope of the caller; every layer reads it.
  Tensor make_table(const ForwardContext& context) const {
    const Tensor cos_sin =
        context.arena.allocate(DType::kF32, {context.input.num_tokens(), rotary_dim()});
    context.backend.rotary_table({.positions = context.input.positions,
                                  .inv_freq = inv_freq_,
                                  .scale = attention_factor_,
                                  .cos_sin = cos_sin});
    return cos_sin;
  }
  int64_t workspace_bytes(int64_t num_tokens) const {
    return Arena::footprint_bytes(DType::kF32, {num_tokens, rotary_dim()});
  }

 private:
  std::vector<float> inv_freq_;
  float attention_factor_;
};

}  // namespace llmserve
