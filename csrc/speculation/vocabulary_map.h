// Tokens of a target's vocabulary as those of a draft model's, which has another tokenizer: by
// their bytes. Guesses are of tokens that both have.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "api/speculation_config.h"
#include "speculation/draft_model.h"
#include "text/vocabulary.h"

namespace llmserve {

class VocabularyMap {
 public:
  // Of vocabularies with so many ids, of which those past a table have no text. Throws
  // InvalidArgument where too few tokens are of both.
  VocabularyMap(const Vocabulary& target, int64_t target_size, const Vocabulary& draft,
                int64_t draft_size);

  // The draft's tokens for one of the target's: the same token, or the longest ones that its bytes
  // are made of. None for ids out of range, special tokens that the draft does not have, and bytes
  // that none of its tokens begin with.
  std::span<const int32_t> to_draft(int32_t target_id) const;
  // -1: the target has no such token.
  int32_t to_target(int32_t draft_id) const { return targets_[static_cast<size_t>(draft_id)]; }
  // The draft's tokens that the target has, increasing.
  const std::vector<int32_t>& shared_draft_ids() const { return shared_; }

 private:
  std::vector<int32_t> draft_ids_;  // of all the target's tokens in turn
  std::vector<size_t> begins_;      // [target ids + 1] into them
  std::vector<int32_t> targets_;    // [draft ids]
  std::vector<int32_t> shared_;
};

// Of a target and its draft model, where config.has_heterogeneous_vocab; else null. Throws
// InvalidArgument where a vocabulary is missing, and what VocabularyMap's constructor throws.
std::shared_ptr<const VocabularyMap> map_vocabularies(const SpeculationConfig& config,
                                                      const std::optional<Vocabulary>& target,
                                                      int64_t target_size,
                                                      const std::optional<Vocabulary>& draft,
                                                      const DraftModel* model);

}  // namespace llmserve
