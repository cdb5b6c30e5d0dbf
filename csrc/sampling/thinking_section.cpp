#include "sampling/thinking_section.h"

#include <algorithm>

namespace llmserve {
namespace {

bool ends_in(std::span<const int32_t> token_ids, std::span<const int32_t> tail) {
  return tail.size() <= token_ids.size() && std::ranges::equal(token_ids.last(tail.size()), tail);
}

}  // namespace

void ThinkingSection::add(std::span<const int32_t> token_ids, bool is_generated) {
  if (is_open_) {
    if (is_generated) ++num_drawn_;
    is_open_ = !ends_in(token_ids.subspan(begin_), budget_->end_token_ids);
  } else if (ends_in(token_ids, budget_->start_token_ids)) {
    is_open_ = true;
    begin_ = token_ids.size();
    num_drawn_ = 0;
  }
}

int32_t ThinkingSection::forced_token_id(std::span<const int32_t> token_ids) const {
  if (!is_open_ || num_drawn_ < budget_->max_tokens) return -1;
  const std::span<const int32_t> end = budget_->end_token_ids;
  size_t num_there = end.size() - 1;
  while (num_there > 0 && !ends_in(token_ids.subspan(begin_), end.first(num_there))) --num_there;
  return end[num_there];
}

}  // namespace llmserve
