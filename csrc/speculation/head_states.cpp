// Which hidden states of the target a drafter of heads keeps: those of tokens that the head has not
// run, and of guesses, until it is known which of them were right.
#include <algorithm>
#include <utility>

#include "speculation/head_drafter.h"

namespace llmserve {
namespace {

// Steps without a guess after which nobody counts on the next.
constexpr int64_t kIdleSteps = 64;
// Of a sequence that nobody guesses, states of so many of its newest tokens stay.
constexpr int64_t kIdleKept = 64;

}  // namespace

void HeadDrafter::drop_kept(Entry& entry, int64_t count) {
  free_.insert(free_.end(), entry.kept.begin(), entry.kept.begin() + count);
  entry.kept.erase(entry.kept.begin(), entry.kept.begin() + count);
  entry.token_ids.erase(entry.token_ids.begin(), entry.token_ids.begin() + count);
  entry.first_kept += count;
}

void HeadDrafter::cut_kept(Entry& entry, int64_t end) {
  const int64_t size = std::clamp<int64_t>(end - entry.first_kept, 0, std::ssize(entry.kept));
  free_.insert(free_.end(), entry.kept.begin() + size, entry.kept.end());
  entry.kept.resize(static_cast<size_t>(size));
  entry.token_ids.resize(static_cast<size_t>(size));
}

// States of the branch's guesses that neither the sequence's own path nor a branch before it has.
void HeadDrafter::keep_branch(Entry& entry, const StepPlan& plan, const ScheduledSequence& branch) {
  const std::span<const int32_t> token_ids = plan.tokens_of(branch);
  int32_t parent = -1;
  for (int64_t i = 1; i < std::ssize(token_ids); ++i) {
    const int64_t position = branch.start_position + i;
    const int32_t token_id = token_ids[static_cast<size_t>(i)];
    if (parent < 0) {
      if (position > entry.end_kept() || position < entry.first_kept) return;
      if (position < entry.end_kept() &&
          entry.token_ids[static_cast<size_t>(position - entry.first_kept)] == token_id)
        continue;
    }
    const auto known = std::ranges::find_if(entry.branch_states, [&](const BranchState& state) {
      return state.parent == parent && state.position == position && state.token_id == token_id;
    });
    if (known != entry.branch_states.end()) {
      parent = static_cast<int32_t>(known - entry.branch_states.begin());
      continue;
    }
    if (free_.empty()) return;
    const int32_t place = free_.back();
    free_.pop_back();
    to_keep_[static_cast<size_t>(branch.first_token + i)] = place;
    entry.branch_states.push_back(
        {.position = position, .token_id = token_id, .parent = parent, .place = place});
    parent = static_cast<int32_t>(std::ssize(entry.branch_states) - 1);
  }
}

// Where a branch was right, its states are the sequence's from there on.
void HeadDrafter::settle_branches(Entry& entry, std::span<const int32_t> known) {
  if (entry.branch_states.empty()) return;
  int64_t position = std::ranges::min(entry.branch_states, {}, &BranchState::position).position;
  for (int32_t parent = -1; position < std::ssize(known); ++position) {
    const int32_t token_id = known[static_cast<size_t>(position)];
    if (parent < 0 && position >= entry.first_kept && position < entry.end_kept() &&
        entry.token_ids[static_cast<size_t>(position - entry.first_kept)] == token_id)
      continue;
    const auto found = std::ranges::find_if(entry.branch_states, [&](const BranchState& state) {
      return state.parent == parent && state.position == position && state.token_id == token_id;
    });
    if (found == entry.branch_states.end()) break;
    if (parent < 0) cut_kept(entry, position);
    if (entry.kept.empty()) entry.first_kept = position;
    entry.kept.push_back(std::exchange(found->place, -1));
    entry.token_ids.push_back(token_id);
    parent = static_cast<int32_t>(found - entry.branch_states.begin());
  }
  drop_branches(entry);
}

void HeadDrafter::drop_branches(Entry& entry) {
  for (const BranchState& state : entry.branch_states)
    if (state.place >= 0) free_.push_back(state.place);
  entry.branch_states.clear();
}

// Nobody guesses: the newest states of each sequence stay.
void HeadDrafter::shed() {
  const int64_t fair = model_.num_kept() / (2 * std::max<int64_t>(1, std::ssize(entries_)));
  const int64_t size = std::clamp<int64_t>(fair, 1, kIdleKept);
  for (auto& [key, entry] : entries_) {
    drop_branches(entry);
    drop_kept(entry, std::max<int64_t>(0, std::ssize(entry.kept) - size));
  }
}

void HeadDrafter::keep_states(const Tensor& states) {
  model_.keep(states, to_keep_);
  std::ranges::fill(to_keep_, -1);
}

void HeadDrafter::take_states(const StepPlan& plan, const Tensor& states) {
  to_keep_.assign(plan.token_ids.size(), -1);
  const bool is_idle = num_idle_steps_ > kIdleSteps;
  bool is_decoding = false;
  size_t row = 0;
  for (size_t i = 0; i < plan.sequences.size(); ++i) {
    const ScheduledSequence& sequence = plan.sequences[i];
    std::span<const int32_t> known;  // none where the step draws nothing
    for (; row < plan.logit_rows.size() &&
           plan.logit_rows[row].sequence_idx == static_cast<int32_t>(i);
         ++row)
      if (known.empty()) known = plan.logit_rows[row].token_ids;
    Entry* const entry = entry_of(sequence.request_id, sequence.sample_index);
    if (entry == nullptr) continue;
    if (sequence.branch_of >= 0) {
      if (!is_too_long(*entry)) keep_branch(*entry, plan, sequence);
      continue;
    }
    settle_branches(*entry, known);
    is_decoding |= !sequence.is_prefill;
    const std::span<const int32_t> token_ids = plan.tokens_of(sequence);
    const int64_t start = sequence.start_position;
    // What stood there was a guess that was not right, or runs again.
    cut_kept(*entry, start);
    entry->num_certain = std::max(entry->num_certain, sequence.num_known());
    if (is_too_long(*entry)) {
      drop_kept(*entry, std::ssize(entry->kept));
      let_go(*entry);
      continue;
    }
    // The last row in the pool may be asked for again.
    const int64_t first = std::max(start, entry->next_position - 1);
    if (first > entry->end_kept() || entry->kept.empty()) {
      drop_kept(*entry, std::ssize(entry->kept));
      entry->first_kept = first;
    }
    for (int64_t position = std::max(first, entry->end_kept()); position < sequence.end_position();
         ++position) {
      if (free_.empty()) keep_states(states);  // before a place is used again
      if (free_.empty() && !is_idle) catch_up();
      if (free_.empty()) shed();
      if (free_.empty()) break;
      const int32_t place = free_.back();
      free_.pop_back();
      to_keep_[static_cast<size_t>(sequence.first_token + position - start)] = place;
      entry->kept.push_back(place);
      entry->token_ids.push_back(token_ids[static_cast<size_t>(position - start)]);
    }
  }
  keep_states(states);
  if (is_decoding) ++num_idle_steps_;
  if (plan.num_prefill_tokens > 0 && !is_idle) catch_up();
}

}  // namespace llmserve
