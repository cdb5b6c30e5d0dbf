// Several tokens drawn of a row of logits, for trees of guesses: each without those before it, and
// by how much the first is ahead of the second.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "sampling/sampler.h"
#include "speculation/draft_tree.h"

namespace llmserve {

class DraftChoices {
 public:
  // Both outlive it.
  DraftChoices(Sampler& sampler, Memory& memory) : sampler_(sampler), memory_(memory) {}

  // Of a step of so many rows.
  void begin(size_t num_rows);
  // Of logits [1, V] in the memory's place, of which `first` was drawn for the task, `count`
  // choices: fewer where no more may be drawn.
  void draw(const ConstTensor& logits, const SampleTask& task, const SampledToken& first,
            int32_t count, size_t row);
  std::span<const DraftChoice> of(size_t row) const { return choices_[row]; }

 private:
  Sampler& sampler_;
  Memory& memory_;
  std::vector<std::vector<DraftChoice>> choices_;  // [>= S]
  std::vector<int32_t> banned_;
  SampledTokens drawn_;
};

}  // namespace llmserve
