// Follows the section that a start sequence of tokens opens and an end sequence closes, and says
// when its end is due.
#pragma once

#include <cstdint>
#include <span>

#include "api/sampling_params.h"

namespace llmserve {

class ThinkingSection {
 public:
  // `budget` lives as long as the section.
  explicit ThinkingSection(const ThinkingBudget& budget) : budget_(&budget) {}

  // Each token once, in order: it is the last of `token_ids`, which are all so far.
  void add(std::span<const int32_t> token_ids, bool is_generated);

  // The next token where the budget is spent: of the end sequence the one after what the section
  // ends in already. -1: any token may come. `token_ids` as of the last add().
  int32_t forced_token_id(std::span<const int32_t> token_ids) const;

 private:
  const ThinkingBudget* budget_;
  bool is_open_ = false;
  size_t begin_ = 0;       // of the section: the first position after its start sequence
  int32_t num_drawn_ = 0;  // generated in it
};

}  // namespace llmserve
