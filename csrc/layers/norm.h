// Normalisation of rows: root-mean-square, or of mean and variance.
#pragma once

#include <string>

#include "layers/forward_context.h"
#include "layers/linear.h"
#include "layers/weight_loader.h"

namespace llmserve {

enum class NormKind : uint8_t { kRms, kLayer };

// How all the norms of a model work.
struct NormSpec {
  NormKind kind = NormKind::kRms;
  NormNumbers numbers;
  bool has_bias = false;   // kLayer
  bool has_weight = true;  // false: a weight of ones, which no file has

  bool operator==(const NormSpec&) const = default;
};

// out = norm(x) with a weight and a bias (or none) [D]. x, out [R, D], or heads [T, H, D] of kRms;
// rows may be strided; out may be x.
inline void normalise(const ForwardContext& context, const NormSpec& spec, const ConstTensor& x,
                      const ConstTensor& weight, const ConstTensor& bias, const Tensor& out) {
  if (spec.kind == NormKind::kRms) {
    context.backend.rms_norm({.x = x, .weight = weight, .out = out, .numbers = spec.numbers});
  } else {
    context.backend.layer_norm(
        {.x = x, .weight = weight, .bias = bias, .out = out, .numbers = spec.numbers});
  }
}

class Norm {
 public:
  // Weights "<name>.weight" and "<name>.bias", if the spec has them.
  Norm(WeightLoader& weights, const std::string& name, int64_t size, const NormSpec& spec)
      : spec_(spec),
        weight_(spec.has_weight ? weights.vector(WeightGroup::kNorm, name + ".weight", size)
                                : weights.constant(WeightGroup::kNorm, size, 1.0f)) {
    if (spec.kind == NormKind::kLayer && spec.has_bias)
      bias_ = weights.vector(WeightGroup::kNorm, name + ".bias", size);
  }

  // x, out [R, size]; rows may be strided; out may be x.
  void forward(const ForwardContext& context, const ConstTensor& x, const Tensor& out) const {
    normalise(context, spec_, x, weight_.view(), bias_.view(), out);
  }

  // norm(x) [R, size] as one linear layer after another reads it, in `normed`. An RMS norm is left
  // to them: until they have run, x must stay as it is, and `normed` holds nothing for others.
  LinearInput before_linear(const ForwardContext& context, const Tensor& x,
                            const Tensor& normed) const {
    if (spec_.kind == NormKind::kRms)
      return {
          normed,
          RmsNormArgs{.x = x, .weight = weight_.view(), .out = normed, .numbers = spec_.numbers}};
    forward(context, x, normed);
    return {normed};
  }

 private:
  NormSpec spec_;
  VectorWeight weight_;  // [size]
  VectorWeight bias_;    // [size] or empty
};

}  // namespace llmserve
