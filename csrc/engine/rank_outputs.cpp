#include "engine/rank_outputs.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace llmserve {

void RankOutputs::begin(Memory& memory, StepSink* next) {
  memory_ = &memory;
  next_ = next;
  for (Rows* rows : {&hidden_, &pooled_, &logits_}) rows->values.clear();
}

void RankOutputs::keep(Rows& rows, const ConstTensor& tensor) {
  const size_t size = rows.values.size();
  rows.width = tensor.shape[1];
  rows.values.resize(size + static_cast<size_t>(tensor.num_elements()));
  memory_->copy_to_host(rows.values.data() + size, tensor.data, tensor.num_bytes());
}

void RankOutputs::take_hidden(const ConstTensor& hidden) {
  keep(hidden_, hidden);
  if (next_ != nullptr) next_->take_hidden(hidden);
}

void RankOutputs::take_pooled_logits(const ConstTensor& logits, const PooledRows& rows) {
  keep(pooled_, logits);
  if (next_ != nullptr) next_->take_pooled_logits(logits, rows);
}

void RankOutputs::take_logits(const ConstTensor& logits, size_t begin) {
  keep(logits_, logits);
  if (next_ != nullptr) next_->take_logits(logits, begin);
}

std::string RankOutputs::difference(const Rows& a, const Rows& b) {
  if (a.values.size() != b.values.size())
    return concat(a.values.size(), " and ", b.values.size(), " numbers of ", a.name);
  const auto same_bits = [](float x, float y) { return std::memcmp(&x, &y, sizeof(x)) == 0; };
  const auto at = std::ranges::mismatch(a.values, b.values, same_bits);
  if (at.in1 == a.values.end()) return {};
  const int64_t idx = at.in1 - a.values.begin();
  return concat(a.name, " row ", idx / a.width, ", element ", idx % a.width, ": ", *at.in1, " and ",
                *at.in2);
}

std::string RankOutputs::difference_from(const RankOutputs& other) const {
  for (const auto rows : {&RankOutputs::hidden_, &RankOutputs::pooled_, &RankOutputs::logits_}) {
    std::string found = difference(this->*rows, other.*rows);
    if (!found.empty()) return found;
  }
  return {};
}

}  // namespace llmserve
