// A drafter of known quality: it has the tokens beforehand, of which it gives some wrongly.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/mix.h"
#include "speculation/drafter.h"
#include "testing/token_oracle.h"

namespace llmserve {

struct RecordedDrafterOptions {
  // By request: what its first sample generates. Without them the token oracle's tokens, of any.
  std::map<RequestId, std::vector<int32_t>> recorded;
  int32_t vocab_size = 256;
  double accuracy = 1;          // the share of guesses that are as recorded
  int64_t change_at = -1;       // from this call of draft() on it is `later_accuracy`, from 1 …
  int64_t change_back_at = -1;  // and from this one on as before
  double later_accuracy = 0;
  int64_t fail_at = -1;   // this call throws
  int32_t bad_token = 0;  // not 0: given in the place of wrong guesses
  int64_t token_us = 0;   // what a guess takes, of all sequences together
  // Without recorded tokens: what ShadowModel::next_token says, of any sample, with min_tokens.
  bool follows_context = false;
};

class RecordedDrafter final : public Drafter {
 public:
  explicit RecordedDrafter(RecordedDrafterOptions options) : options_(std::move(options)) {}

  void draft(std::span<const DraftTask> tasks, std::span<std::vector<int32_t>> drafts) override {
    ++num_calls_;
    if (num_calls_ == options_.fail_at) throw std::runtime_error("the drafter was told to fail");
    int32_t longest = 0;
    trees_.assign(tasks.size(), {});
    for (size_t i = 0; i < tasks.size(); ++i) {
      longest = std::max(longest, tasks[i].max_tokens);
      for (int32_t ahead = 0; ahead < tasks[i].max_tokens; ++ahead) {
        const int32_t token_id = guess(tasks[i], drafts[i]);
        if (token_id == kNoTokenId) break;
        drafts[i].push_back(token_id);
      }
      if (tasks[i].tree != nullptr) grow(tasks[i], drafts[i], trees_[i]);
    }
    if (options_.token_us > 0)
      std::this_thread::sleep_for(std::chrono::microseconds(options_.token_us * longest));
  }

  const DraftTree* tree(size_t task_idx) const override { return &trees_[task_idx]; }

 private:
  // Beside each guess others, one of them right where it is wrong, each with one guess behind it,
  // the drafter's own.
  void grow(const DraftTask& task, std::span<const int32_t> draft, DraftTree& tree) const {
    int32_t parent = -1;
    for (size_t place = 0; place < draft.size(); ++place) {
      const auto add = [&](int32_t before, int32_t token_id, int32_t rank) {
        tree.nodes.push_back({.parent = before,
                              .token_id = token_id,
                              .rank = rank,
                              .distance = static_cast<float>(token_id % 5)});
        return static_cast<int32_t>(tree.nodes.size()) - 1;
      };
      const int32_t own = add(parent, draft[place], 0);
      std::vector<int32_t> path(draft.begin(), draft.begin() + static_cast<int64_t>(place));
      for (int32_t rank = 1; rank < task.tree->config.tree_width; ++rank) {
        const int32_t other = (draft[place] + options_.vocab_size - rank) % options_.vocab_size;
        const int32_t node = add(parent, other, rank);
        if (place + 1 >= draft.size()) continue;
        path.push_back(other);
        const int32_t behind = guess(task, path);
        path.pop_back();
        if (behind != kNoTokenId) add(node, behind, 0);
      }
      parent = own;
    }
  }

  // The next token after the task's and `draft`.
  int32_t guess(const DraftTask& task, std::span<const int32_t> draft) const {
    const int64_t position = std::ssize(task.token_ids) + std::ssize(draft);
    int32_t token_id = options_.follows_context
                           ? next_token(task, draft)
                           : oracle_token(task.seed, position, options_.vocab_size);
    if (!options_.recorded.empty()) {
      const auto found = options_.recorded.find(task.request_id);
      const auto generated = static_cast<size_t>(position - task.num_prompt_tokens);
      if (found == options_.recorded.end() || generated >= found->second.size()) return kNoTokenId;
      token_id = found->second[generated];
    }
    const bool is_later = options_.change_at >= 0 && num_calls_ >= options_.change_at &&
                          (options_.change_back_at < 0 || num_calls_ < options_.change_back_at);
    const double accuracy = is_later ? options_.later_accuracy : options_.accuracy;
    const uint64_t noise = mix64(mix64(task.seed, static_cast<uint64_t>(position)), 0x5eed);
    const bool is_right = static_cast<double>(noise >> 11) * 0x1p-53 < accuracy;
    if (is_right) return token_id;
    return options_.bad_token != 0 ? options_.bad_token : (token_id + 1) % options_.vocab_size;
  }

  int32_t next_token(const DraftTask& task, std::span<const int32_t> draft) const {
    std::vector<int32_t> context(task.token_ids.begin(), task.token_ids.end());
    context.insert(context.end(), draft.begin(), draft.end());
    const int64_t num_generated = std::ssize(context) - task.num_prompt_tokens;
    const bool may_stop = num_generated >= task.params->min_tokens;
    return ShadowModel::next_token(context, task.seed, options_.vocab_size,
                                   may_stop ? std::span<const int32_t>() : task.stop_token_ids);
  }

  const RecordedDrafterOptions options_;
  int64_t num_calls_ = 0;
  std::vector<DraftTree> trees_;  // [tasks] of the last call
};

}  // namespace llmserve
