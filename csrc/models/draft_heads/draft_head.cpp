#include "models/draft_heads/draft_head.h"

#include <numeric>

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

void DraftHead::copy_rows(const ForwardContext& context, const ConstTensor& from,
                          const Tensor& to) {
  std::vector<int32_t> rows(static_cast<size_t>(from.shape[0]));
  std::iota(rows.begin(), rows.end(), 0);
  context.backend.gather_rows({.x = from, .rows = rows, .out = to});
}

int64_t DraftHead::logit_bytes(int64_t vocab_size, int64_t hidden_size, int64_t num_rows) {
  return Arena::footprint_bytes(DType::kF32, {num_rows, vocab_size}) +
         Arena::footprint_bytes(DType::kF32, {num_rows, hidden_size});
}

}  // namespace llmserve
