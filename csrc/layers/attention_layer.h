// The part of a decoder's layer in which tokens see each other.
#pragma once

#include "layers/forward_context.h"
#include "layers/linear.h"
#include "layers/rotary.h"

namespace llmserve {

// Rows [T, H * width], which may be strided, as heads [T, H, width].
inline Tensor as_heads(const Tensor& rows, int64_t num_heads) {
  const int64_t width = rows.shape[1] / num_heads;
  Tensor heads = rows;
  heads.rank = 3;
  heads.shape[1] = num_heads;
  heads.shape[2] = width;
  heads.strides[1] = width;
  heads.strides[2] = 1;
  return heads;
}

class AttentionLayer {
 public:
  virtual ~AttentionLayer() = default;

  // Where a step's output goes.
  struct Output {
    Tensor out;               // [T, E]
    bool accumulate = false;  // adds to what out holds; then out may be x or what it is a norm of
  };
  // Stores in the layer's cache what later steps need of these tokens. x [T, E].
  virtual void forward(const ForwardContext& context, const LinearInput& x,
                       const RotaryTables& angles, const PagedKvCache& cache,
                       const Output& to) const = 0;
  // The arena's peak, exactly, of a forward() of so many tokens. Fewer never need more.
  virtual int64_t workspace_bytes(int64_t num_tokens) const = 0;
};

}  // namespace llmserve
