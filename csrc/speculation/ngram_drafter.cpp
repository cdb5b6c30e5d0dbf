#include "speculation/ngram_drafter.h"

#include <algorithm>

namespace llmserve {

// A match that overlaps the newest tokens repeats itself: what is guessed goes on with the guesses.
void NgramDrafter::draft(std::span<const DraftTask> tasks, std::span<std::vector<int32_t>> drafts) {
  for (size_t i = 0; i < tasks.size(); ++i) {
    const DraftTask& task = tasks[i];
    NgramIndex& index =
        indices_.try_emplace({task.request_id, task.sample_index}, min_size_, max_size_)
            .first->second;
    index.extend(task.token_ids);
    matches_.clear();
    index.find(task.token_ids, task.token_ids, matches_);
    // The longest, of several the newest.
    const auto longest = std::ranges::max_element(matches_, {}, &NgramIndex::Match::size);
    if (longest == matches_.end()) continue;
    const int64_t begin = longest->end;
    std::vector<int32_t>& draft = drafts[i];
    const int64_t num_tokens = std::ssize(task.token_ids);
    for (int64_t p = begin; std::ssize(draft) < task.max_tokens; ++p) {
      const int32_t token_id = p < num_tokens ? task.token_ids[static_cast<size_t>(p)]
                                              : draft[static_cast<size_t>(p - num_tokens)];
      if (token_id < 0) break;  // a vector of the prompt
      draft.push_back(token_id);
    }
  }
}

void NgramDrafter::forget(RequestId request_id, int32_t sample_index, bool) {
  indices_.erase({request_id, sample_index});
}

}  // namespace llmserve
