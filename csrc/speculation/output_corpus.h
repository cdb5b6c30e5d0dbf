// Finished outputs of one salt, bounded: two generations, of which the older one goes as a whole
// when the newer is half of the bound.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "speculation/ngram_index.h"

namespace llmserve {

// A text and its index.
struct IndexedText {
  IndexedText(int32_t min_size, int32_t max_size) : index(min_size, max_size) {}

  std::vector<int32_t> token_ids;
  NgramIndex index;
};

class OutputCorpus {
 public:
  // At most max_outputs are kept, and no more than 2^21 tokens of them.
  OutputCorpus(int32_t max_outputs, int32_t min_size, int32_t max_size)
      : max_outputs_(max_outputs), min_size_(min_size), max_size_(max_size) {}

  void add(std::span<const int32_t> output);
  // Calls visit(text) for each part.
  template <class Visit>
  void for_each(const Visit& visit) const {
    if (newer_) visit(*newer_);
    if (older_) visit(*older_);
  }
  int64_t num_tokens() const;

 private:
  const int32_t max_outputs_;
  const int32_t min_size_;
  const int32_t max_size_;
  std::optional<IndexedText> newer_;  // outputs with a kNoTokenId behind each
  std::optional<IndexedText> older_;
  int32_t num_newer_ = 0;  // outputs
};

}  // namespace llmserve
