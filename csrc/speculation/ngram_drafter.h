// Prompt lookup: guesses what followed the newest tokens where they stood before in the same
// sequence (Saxena 2023, "Prompt Lookup Decoding"). Text that repeats its prompt has most of its
// tokens guessed; other text has hardly any guesses, and costs nothing.
#pragma once

#include <map>
#include <utility>

#include "speculation/drafter.h"
#include "speculation/ngram_index.h"

namespace llmserve {

class NgramDrafter final : public Drafter {
 public:
  NgramDrafter(int32_t min_size, int32_t max_size) : min_size_(min_size), max_size_(max_size) {}

  void draft(std::span<const DraftTask> tasks, std::span<std::vector<int32_t>> drafts) override;
  void forget(RequestId request_id, int32_t sample_index, bool is_last) override;
  int64_t num_sequences() const override { return static_cast<int64_t>(indices_.size()); }

 private:
  const int32_t min_size_;
  const int32_t max_size_;
  std::map<std::pair<RequestId, int32_t>, NgramIndex> indices_;  // by request and sample
  std::vector<NgramIndex::Match> matches_;                       // of the task at hand
};

}  // namespace llmserve
