// What a backend adds to Backend where it looks at values as it packs them.
#pragma once

#include <span>

#include "core/buffer.h"
#include "core/tensor.h"
#include "kernels/ops.h"

namespace llmserve {

class UncheckedPacking {
 public:
  virtual ~UncheckedPacking() = default;

  // As Backend::pack_linear, of parts that nobody has looked at: a device would otherwise wait
  // while the host reads them once more. Says whether all values are finite;
  // Backend::first_non_finite finds the one that is not.
  virtual LinearWeight pack_unchecked(std::span<const ConstTensor> parts, DType dtype,
                                      bool& is_finite) = 0;
  // The same of a contiguous f32, bf16 or f16 tensor that stays as it is.
  virtual Buffer bring_over(const ConstTensor& tensor, bool& is_finite) = 0;
};

}  // namespace llmserve
