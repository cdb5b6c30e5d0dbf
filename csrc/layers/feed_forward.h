// The part of a decoder's layer that is for each token by itself.
#pragma once

#include "layers/forward_context.h"
#include "layers/linear.h"

namespace llmserve {

class FeedForward {
 public:
  virtual ~FeedForward() = default;

  // out [T, E] = the layer's output for x [T, E], added to what `out` holds if `accumulate`; then
  // out may be x, or what x is the norm of.
  virtual void forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
                       bool accumulate) const = 0;
  // The arena's peak, exactly, of a forward() of so many tokens. Fewer never need more.
  virtual int64_t workspace_bytes(int64_t num_tokens) const = 0;
};

}  // namespace llmserve
