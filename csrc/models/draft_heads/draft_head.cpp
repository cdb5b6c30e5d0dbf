#include "models/draft_heads/draft_head.h"

#include <algorithm>

#include "core/arena.h"
#include "core/error.h"

namespace llmserve {

HeadKind head_kind(std::string_view method) {
  if (method == "eagle3") return HeadKind::kEagle3;
  if (method == "eagle") return HeadKind::kEagle;
  if (method == "medusa") return HeadKind::kMedusa;
  if (method == "mtp") return HeadKind::kMtp;
  throw NotSupported(concat("speculative_config: method \"", method, "\" has no head"));
}

void DraftHead::copy_rows(const ConstTensor& from, const Tensor& to) {
  for (int64_t i = 0; i < from.shape[0]; ++i)
    std::copy_n(from.as<float>() + i * from.strides[0], from.shape[1],
                to.as<float>() + i * to.strides[0]);
}

int64_t DraftHead::logit_bytes(int64_t vocab_size, int64_t hidden_size, int64_t num_rows) {
  return Arena::footprint_bytes(DType::kF32, {num_rows, vocab_size}) +
         Arena::footprint_bytes(DType::kF32, {num_rows, hidden_size});
}

}  // namespace llmserve
