// Checks of tensor shapes by named dimensions, with messages that say what was expected.
#pragma once

#include <initializer_list>
#include <string_view>

#include "core/dtype.h"
#include "core/tensor.h"

namespace llmserve {

// One expected dimension: its letter (see docs/glossary.md) and its size; -1 takes any size.
struct Dim {
  std::string_view letter;
  int64_t size = -1;
};

// Throws InvalidArgument unless `tensor` has this shape and one of these dtypes and, if asked, a
// contiguous last dimension: "linear.x: expected float32 [M=4, K=64], got float32 [4, 32]".
void check_tensor(std::string_view what, const ConstTensor& tensor, std::initializer_list<Dim> dims,
                  std::initializer_list<DType> dtypes);

}  // namespace llmserve
