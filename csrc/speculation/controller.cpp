#include "speculation/controller.h"

#include <algorithm>
#include <functional>

namespace llmserve {
namespace {

// Guessing begins where it promises so much, and ends where it promises hardly more than plain
// steps: what is foreseen is off by some percent, and where it is it is more often too much, since
// the best of several is chosen.
constexpr double kGainToBegin = 1.03;
constexpr double kGainToGoOn = 1.02;
// A trial is so many steps of so many guesses; the next one comes after so many steps, twice as
// many each time it does not pay. A hopeless model costs half a step for each step of a trial: 1.5
// of 64, then of 128 and 256.
constexpr int32_t kTrialSteps = 3;
constexpr int32_t kTrialTokens = 3;
constexpr int64_t kMinTrialInterval = 64;
constexpr int64_t kMaxTrialInterval = 256;
// One plain step in so many keeps its time known; more of them at first, since a single step may
// have been held up.
constexpr int64_t kMinPlainInterval = 8, kMaxPlainInterval = 256;
// Rows of a step beyond the largest that was measured, at most: twice as many, or so many more.
// What rows cost there is not known yet.
constexpr int64_t kMoreRows = 8;
// A row more costs at least this share of a plain step, whatever was measured: times of a busy
// machine are off by more.
constexpr double kLeastRowShare = 0.01;
// What branches gain is that of about the last 1 / kTreeWeight steps with trees. First some chains
// are guessed and some trees, and later one in so many is of the other kind.
constexpr double kTreeWeight = 0.1;
constexpr int64_t kFirstChains = 4, kFirstTrees = 12, kOtherInterval = 32;
// A time of guessing that is much longer than what is known is that of catching up with a prompt.
constexpr double kMuchLonger = 1.6, kMuchLongerWeight = 0.1, kTimeWeight = 0.3;

}  // namespace

void SpeculationController::plan(std::span<DraftHistory* const> sequences, int64_t num_rows) {
  ++num_plans_;
  const int32_t max_tokens = config_.max_tokens_of(num_rows);
  for (DraftHistory* sequence : sequences) sequence->num_planned = 0;
  gain_ = 0;
  if (max_tokens == 0 || sequences.empty()) return;
  if (!config_.is_adaptive) {
    for (DraftHistory* sequence : sequences)
      sequence->num_planned = std::min(max_tokens, sequence->max_planned);
    return;
  }
  // Before guesses are made it has to be known what steps take without.
  const bool is_known = times_.least_rows() > 0 && times_.least_rows() <= num_rows;
  if (!is_known || (is_on_ && ++num_since_plain_ > plain_interval_)) {
    num_since_plain_ = 0;
    plain_interval_ = std::clamp(2 * plain_interval_, kMinPlainInterval, kMaxPlainInterval);
    return;
  }
  begin_trial(sequences, max_tokens);
  int64_t num_trial_rows = 0;
  for (DraftHistory* sequence : sequences) {
    if (sequence->num_trials == 0) continue;
    --sequence->num_trials;
    sequence->num_planned = std::min({max_tokens, sequence->max_planned, kTrialTokens});
    num_trial_rows += sequence->num_planned;
  }
  list_rows(sequences, max_tokens);
  const size_t count = choose_rows(num_rows, num_trial_rows);
  for (size_t i = 0; i < count; ++i) ++sequences[rows_[i].sequence]->num_planned;
  is_on_ = count > 0;
  if (is_on_) trial_interval_ = kMinTrialInterval;
}

// All guesses that there could be but those of trials, the likeliest first. A place comes after
// those before it, which are at least as likely.
void SpeculationController::list_rows(std::span<DraftHistory* const> sequences,
                                      int32_t max_tokens) {
  rows_.clear();
  std::array<double, kMaxDraftTokens> survival;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const DraftHistory& sequence = *sequences[i];
    if (sequence.num_planned > 0) continue;
    const auto count = static_cast<size_t>(std::min(max_tokens, sequence.max_planned));
    sequence.acceptance.fill_survival(&all_, num_plans_, std::span(survival).first(count));
    for (size_t place = 0; place < count; ++place)
      rows_.push_back({i, static_cast<int32_t>(place), survival[place]});
  }
  std::ranges::sort(rows_, [](const Row& a, const Row& b) {
    if (a.survival != b.survival) return a.survival > b.survival;
    return a.place != b.place ? a.place < b.place : a.sequence < b.sequence;
  });
}

// How many of the rows pay most.
size_t SpeculationController::choose_rows(int64_t num_rows, int64_t num_trial_rows) {
  const double plain_us = times_.estimate_us(num_rows);
  double tokens = static_cast<double>(num_rows);
  int32_t depth = 0;
  size_t best = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    tokens += rows_[i].survival;
    depth = std::max(depth, rows_[i].place + 1);
    const int64_t num_all = num_rows + num_trial_rows + static_cast<int64_t>(i) + 1;
    if (num_all > max_rows()) break;
    const double time = (verify_us(num_rows, num_all) + draft_us(depth)) / plain_us;
    const double gain = tokens / static_cast<double>(num_rows) / time;
    if (gain <= gain_) continue;
    gain_ = gain;
    best = i + 1;
  }
  return gain_ >= (is_on_ ? kGainToGoOn : kGainToBegin) ? best : 0;
}

int64_t SpeculationController::max_rows() const {
  const int64_t most = times_.most_rows();
  return std::max(2 * most, most + kMoreRows);
}

double SpeculationController::verify_us(int64_t num_rows, int64_t num_all) const {
  const double least = 1 + kLeastRowShare * static_cast<double>(num_all - num_rows);
  return std::max(times_.estimate_us(num_all), times_.estimate_us(num_rows) * least);
}

// Those that give most for a row first, as long as the whole step gives more for its time.
void SpeculationController::choose_branches(std::span<BranchOffer* const> offers, int64_t num_rows,
                                            int64_t num_all, double tokens, int32_t depth) {
  std::vector<BranchOffer*> sorted(offers.begin(), offers.end());
  std::ranges::stable_sort(sorted, std::ranges::greater(), [](const BranchOffer* offer) {
    return offer->tokens / static_cast<double>(offer->num_rows);
  });
  const double drafted_us = draft_us(depth);
  const double own_us = verify_us(num_rows, num_all) + drafted_us;
  const double own_pace = tokens / own_us;
  for (BranchOffer* offer : sorted) {
    const int64_t rows = num_all + offer->num_rows;
    if (rows > max_rows()) continue;
    const double pace = tokens / (verify_us(num_rows, num_all) + drafted_us);
    if ((tokens + offer->tokens) / (verify_us(num_rows, rows) + drafted_us) <= pace) continue;
    offer->is_taken = true;
    num_all = rows;
    tokens += offer->tokens;
  }
  const double gain = tokens / (verify_us(num_rows, num_all) + drafted_us) / own_pace - 1;
  tree_gain_ += kTreeWeight * (gain - tree_gain_);
  tree_cost_ = (draft_us(depth, true) - drafted_us) / own_us;
}

bool SpeculationController::wants_trees() {
  const int64_t question = num_tree_questions_++;
  if (!config_.is_adaptive) return true;
  if (question < kFirstChains) return false;  // what guessing takes without has to be known
  const bool do_pay = question < kFirstChains + kFirstTrees || tree_gain_ > tree_cost_;
  return question % kOtherInterval == 0 ? !do_pay : do_pay;
}

double SpeculationController::row_price(int64_t num_rows) const {
  constexpr int64_t kRows = 4;  // over which the price is looked at
  const double plain_us = times_.estimate_us(num_rows);
  if (plain_us == 0) return 0;
  const double share = verify_us(num_rows, num_rows + kRows) / plain_us - 1;
  return static_cast<double>(num_rows) * share / kRows;
}

// Where no guesses were made for long, one sequence is tried again: the one of which the least is
// known.
void SpeculationController::begin_trial(std::span<DraftHistory* const> sequences,
                                        int32_t max_tokens) {
  if (is_on_ || std::ranges::any_of(sequences, [](auto* s) { return s->num_trials > 0; })) {
    num_since_trial_ = 0;
    return;
  }
  if (trial_interval_ == 0) trial_interval_ = kMinTrialInterval;
  if (++num_since_trial_ < trial_interval_ || max_tokens == 0) return;
  num_since_trial_ = 0;
  trial_interval_ = std::min(2 * trial_interval_, kMaxTrialInterval);
  DraftHistory& sequence = **std::ranges::min_element(
      sequences, {}, [](const DraftHistory* s) { return s->acceptance.num_tries(); });
  sequence.num_trials = kTrialSteps;
}

void SpeculationController::note_draft(int32_t num_tokens, double elapsed_us, bool are_trees) {
  double& known =
      draft_us_[are_trees ? 1 : 0][static_cast<size_t>(std::min(num_tokens, kMaxDraftTokens))];
  if (known == 0) known = elapsed_us;
  known += (elapsed_us > kMuchLonger * known ? kMuchLongerWeight : kTimeWeight) *
           (std::min(elapsed_us, 3 * known) - known);
}

// Measured for as many tokens, or in proportion to what was measured for others: each token takes
// another pass of the draft model. No longer than for more tokens, nor than in proportion to fewer:
// a single time may be that of catching up.
double SpeculationController::draft_us(int32_t num_tokens, bool are_trees) const {
  const auto& times = draft_us_[are_trees ? 1 : 0];
  double nearest = 0;
  for (int32_t distance = 0; distance <= kMaxDraftTokens && nearest == 0; ++distance) {
    for (const int32_t other : {num_tokens + distance, num_tokens - distance}) {
      if (other < 1 || other > kMaxDraftTokens || nearest > 0) continue;
      nearest = times[static_cast<size_t>(other)] * num_tokens / other;
    }
  }
  for (int32_t other = 1; other <= kMaxDraftTokens; ++other) {
    const double known = times[static_cast<size_t>(other)];
    if (known > 0)
      nearest = std::min(nearest, other >= num_tokens ? known : known * num_tokens / other);
  }
  return nearest;
}

void SpeculationController::note_outcome(DraftHistory& sequence, int32_t num_drafted,
                                         int32_t num_accepted, bool is_cut) {
  sequence.acceptance.add(num_drafted, num_accepted, is_cut, num_plans_);
  all_.add(num_drafted, num_accepted, is_cut, num_plans_);
}

}  // namespace llmserve
