// Root-mean-square normalisation.
#pragma once

#include <string>

#include "layers/forward_context.h"
#include "layers/weight_loader.h"

namespace llmserve {

class RmsNorm {
 public:
  RmsNorm(WeightLoader& weights, const std::string& name, int64_t size, float eps)
      : weight_(weights.vector(WeightGroup::kNorm, name, size)), eps_(eps) {}

  // x, out [R, size] or [T, H, size], strided as the op allows; out may be x.
  void forward(const ForwardContext& context, const ConstTensor& x, const Tensor& out) const {
    context.backend.rms_norm({.x = x, .weight = weight_.view(), .out = out, .eps = eps_});
  }

 private:
  VectorWeight weight_;  // [size]
  float eps_;
};

}  // namespace llmserve
