#include "comm/communicator.h"

#include "core/error.h"

namespace llmserve {

void check_reduced(const char* op, const ConstTensor& data) {
  const bool is_float =
      data.dtype == DType::kF32 || data.dtype == DType::kBF16 || data.dtype == DType::kF16;
  if (!is_float || !data.is_contiguous())
    throw InvalidArgument(
        concat(op, ": expected a contiguous tensor in float32, bfloat16 or float16, got ",
               describe(data)));
}

void check_parts(const char* op, const ConstTensor& part, const ConstTensor& whole,
                 int world_size) {
  check_reduced(op, part);
  check_reduced(op, whole);
  if (part.dtype != whole.dtype || part.num_elements() * world_size != whole.num_elements())
    throw InvalidArgument(concat(op, ": expected ", world_size, " times the elements of ",
                                 describe(part), ", got ", describe(whole)));
}

}  // namespace llmserve
