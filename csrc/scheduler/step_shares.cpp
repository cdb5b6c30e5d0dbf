#include "scheduler/step_shares.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace llmserve {
namespace {

// Enough that a step that the machine's other work holds up does not decide, and a percent or so of
// the time between trials.
constexpr int32_t kTrialSteps = 16;
constexpr int32_t kStepsBetweenTrials = 2048;

}  // namespace

StepShares::StepShares(int32_t max_shares) {
  for (int32_t shares = max_shares; shares > 1; shares /= 2) choices_.push_back(shares);
  choices_.push_back(1);
  for (Size& size : sizes_) size.us_per_token.resize(choices_.size());
}

size_t StepShares::idx(int64_t num_decoding) {
  return std::min<size_t>(std::bit_width(static_cast<uint64_t>(num_decoding)), kNumSizes - 1);
}

int32_t StepShares::of(int64_t num_decoding) const {
  return choices_[sizes_[idx(num_decoding)].choice];
}

// The first steps of a trial overlap those of another choice, and do not count.
void StepShares::note_step(int64_t num_decoding, int32_t num_shares, int64_t num_tokens,
                           int64_t elapsed_us) {
  Size& size = sizes_[idx(num_decoding)];
  if (choices_.size() == 1 || num_shares != choices_[size.choice]) return;
  ++size.num_steps;
  if (!size.is_trial) {
    if (size.num_steps >= kStepsBetweenTrials) size = {.us_per_token = size.us_per_token};
    return;
  }
  if (size.num_steps <= choices_.front()) return;
  size.num_tokens += num_tokens;
  size.elapsed_us += elapsed_us;
  if (size.num_steps >= choices_.front() + kTrialSteps) end_trial(size);
}

void StepShares::end_trial(Size& size) const {
  size.us_per_token[size.choice] = size.num_tokens == 0 ? 0
                                                        : static_cast<double>(size.elapsed_us) /
                                                              static_cast<double>(size.num_tokens);
  const bool has_time = size.elapsed_us > 0;
  const size_t next = size.choice + 1;
  size = {.us_per_token = std::move(size.us_per_token)};
  if (has_time && next < choices_.size()) {
    size.choice = next;
    return;
  }
  size.is_trial = false;
  if (!has_time) return;  // the first
  size.choice =
      static_cast<size_t>(std::ranges::min_element(size.us_per_token) - size.us_per_token.begin());
}

}  // namespace llmserve
