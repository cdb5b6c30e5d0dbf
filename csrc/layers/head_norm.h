// The norm of queries or keys between their projection and the rotation.
#pragma once

#include <string>

#include "layers/norm.h"

namespace llmserve {

enum class QkNorm : uint8_t {
  kNone,
  kHead,        // over each head, one weight [D] for all
  kProjection,  // over all heads at once, weight [H * D]
  kEachHead,    // over each head, with weights of its own: one tensor [H, D], or H tensors [D]
};

class HeadNorm {
 public:
  // Weights "<name>.weight" and, if the spec has it, "<name>.bias". With kEachHead, a "{}" in the
  // name stands for the number of a head, and without one the tensor has them all.
  HeadNorm(WeightLoader& weights, const std::string& name, int64_t num_heads, int64_t head_dim,
           QkNorm kind, const NormSpec& spec);

  // heads [T, n, D] in place, from head `first` on: columns of one matrix, tokens may be strided.
  // With kProjection they are all H.
  void forward(const ForwardContext& context, const Tensor& heads, int64_t first = 0) const;

  ConstTensor weight() const { return weight_.view(); }  // [D] or [H * D]

 private:
  QkNorm kind_;
  NormSpec spec_;
  VectorWeight weight_;  // [D] or [H * D]
  VectorWeight bias_;    // as many, or empty
};

}  // namespace llmserve
