#include "core/arena.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {

int64_t Arena::footprint_bytes(DType dtype, std::initializer_list<int64_t> dims) {
  int64_t bytes = size_bytes(dtype);
  for (const int64_t dim : dims) bytes *= dim;
  return (bytes + 63) / 64 * 64;
}

Tensor Arena::allocate(DType dtype, std::initializer_list<int64_t> dims) {
  const int64_t bytes = footprint_bytes(dtype, dims);
  if (used_ + bytes > buffer_.num_bytes()) {
    throw InternalError(concat("the step's workspace of ", buffer_.num_bytes(), " bytes is ",
                               used_ + bytes - buffer_.num_bytes(),
                               " bytes too small; please report this"));
  }
  Tensor tensor(buffer_.data() + used_, dtype, dims);
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return tensor;
}

}  // namespace llmserve
