#include "speculation/speculator.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "core/clock.h"
#include "core/error.h"
#include "sampling/sampling_slot.h"

namespace llmserve {
namespace {

// Where fewer first guesses are right than this, after so many tries, the draft model is of another
// kind of text or of another vocabulary: one that fits has 0.6 to 0.8.
constexpr double kMismatch = 0.3;
constexpr int64_t kMismatchTries = 256;

}  // namespace

Speculator::Speculator(const SpeculationConfig& config, const DrafterContext& context,
                       int64_t max_model_len, std::unique_ptr<Drafter> drafter)
    : config_(config),
      max_model_len_(max_model_len),
      vocab_size_(context.vocab_size),
      max_exact_rows_(context.max_exact_rows),
      kind_(find_drafter(config.method)),
      drafter_(drafter ? std::move(drafter) : kind_.make(context)),
      controller_(config_),
      tree_request_{.config = config_, .rates = rates_} {}

bool Speculator::can_draft(const Request& request) {
  return !request.pooling && !request.beam_search && request.params.logits_processors.empty();
}

bool Speculator::can_branch(const SamplingParams& params) {
  return !SamplingSlot::is_needed(params) && params.grammar == nullptr;
}

int64_t Speculator::num_sequences() const { return std::ssize(kept_) + drafter_->num_sequences(); }

// Those that stand still and have one token to run: their guesses can be of no other place.
void Speculator::find_candidates(const RunningSet& running) {
  candidates_.clear();
  for (const Sequence* sequence : running) {
    if (!sequence->has_drafter || sequence->num_samples != 1 || !sequence->is_decoding() ||
        sequence->state != SequenceState::kRunning || sequence->num_in_flight > 0 ||
        sequence->num_awaited_masks > 0 || sequence->is_abort_requested)
      continue;
    const int64_t num_left = std::min<int64_t>(sequence->max_tokens - sequence->num_generated(),
                                               max_model_len_ - sequence->num_tokens());
    if (num_left <= 1) continue;  // the step gives the last token as it is
    std::vector<DraftHistory>& samples = kept_[sequence->request_id];
    if (samples.empty()) samples.resize(static_cast<size_t>(sequence->params().n));
    DraftHistory& kept = samples[static_cast<size_t>(sequence->sample_index)];
    learn_choices(*sequence, kept);
    kept.max_planned = static_cast<int32_t>(std::min<int64_t>(num_left - 1, kMaxDraftTokens));
    candidates_.push_back({sequence, &kept});
  }
}

DraftTask Speculator::task_of(const Candidate& candidate, int32_t max_tokens) const {
  const Sequence& sequence = *candidate.sequence;
  return {.request_id = sequence.request_id,
          .sample_index = sequence.sample_index,
          .token_ids = sequence.token_ids,
          .num_prompt_tokens = sequence.num_prompt_tokens,
          .seed = sequence.seed,
          .params = &sequence.params(),
          .stop_token_ids = sequence.stop_token_ids,
          .max_tokens = max_tokens,
          .tree = wants_trees_ && can_branch(sequence.params()) ? &tree_request_ : nullptr,
          .cache_salt = sequence.context->request.cache_salt};
}

void Speculator::propose(const RunningSet& running, const std::function<void(DraftReady)>& take,
                         std::vector<Decision>& decisions) {
  if (has_failed_) return;
  find_candidates(running);
  if (candidates_.empty()) return;
  const int64_t num_rows =
      std::ranges::count_if(running, [](const Sequence* s) { return s->is_decoding(); });
  draft(num_rows);
  for (size_t i = 0; i < tasks_.size() && !has_failed_; ++i) {
    if (drafts_[i].empty()) continue;
    const DraftTask& task = tasks_[i];
    DraftReady draft{.request_id = task.request_id,
                     .sample_index = task.sample_index,
                     .position = std::ssize(task.token_ids)};
    int64_t num_guesses = std::ssize(drafts_[i]);
    for (Path& path : paths_) {
      if (path.task_idx != i || !path.offer.is_taken) continue;
      num_guesses += path.num_own;
      draft.branches.push_back(std::move(path.token_ids));
    }
    draft.token_ids = std::move(drafts_[i]);
    decisions.push_back({.request_id = task.request_id,
                         .sample_index = task.sample_index,
                         .kind = DecisionKind::kDrafted,
                         .detail = num_guesses});
    take(std::move(draft));
  }
  if (controller_.gain() == 0) return;
  for (const Candidate& candidate : candidates_) {
    if (candidate.kept->num_planned > 0 || candidate.kept->max_planned == 0) continue;
    decisions.push_back({.request_id = candidate.sequence->request_id,
                         .sample_index = candidate.sequence->sample_index,
                         .kind = DecisionKind::kDraftsOff,
                         .detail = std::lround(100 * controller_.gain())});
  }
}

// A model's guesses cost time: first it is said how many there are to be. Others are made first,
// since often there are none, and then it is said how many of them run.
void Speculator::draft(int64_t num_rows) {
  tasks_.clear();
  histories_.clear();
  paths_.clear();
  const int32_t max_tokens = config_.max_tokens_of(num_rows);
  if (max_tokens == 0) return;
  if (kind_.has_weights()) {
    for (const Candidate& candidate : candidates_) histories_.push_back(candidate.kept);
    plan(num_rows);
    wants_trees_ = config_.has_trees() && controller_.wants_trees();
    tree_request_.min_survival = config_.is_adaptive ? controller_.row_price(num_rows) : 0;
    for (const Candidate& candidate : candidates_)
      if (candidate.kept->num_planned > 0)
        tasks_.push_back(task_of(candidate, candidate.kept->num_planned));
    call_drafter();
    if (wants_trees_ && !has_failed_) choose_branches(num_rows);
    return;
  }
  for (const Candidate& candidate : candidates_)
    tasks_.push_back(task_of(candidate, std::min(max_tokens, candidate.kept->max_planned)));
  call_drafter();
  for (size_t i = 0; i < tasks_.size(); ++i) {
    candidates_[i].kept->max_planned = static_cast<int32_t>(drafts_[i].size());
    if (!drafts_[i].empty()) histories_.push_back(candidates_[i].kept);
  }
  plan(num_rows);
  for (size_t i = 0; i < tasks_.size(); ++i)
    if (!drafts_[i].empty())
      drafts_[i].resize(static_cast<size_t>(candidates_[i].kept->num_planned));
}

// Where a step of more rows would have other bits, there are no more.
void Speculator::plan(int64_t num_rows) {
  controller_.plan(histories_, num_rows);
  if (max_exact_rows_ == 0) return;
  int64_t num_left = std::max<int64_t>(0, max_exact_rows_ - num_rows);
  for (DraftHistory* history : histories_) {
    history->num_planned = static_cast<int32_t>(std::min<int64_t>(history->num_planned, num_left));
    num_left -= history->num_planned;
  }
}

void Speculator::call_drafter() {
  if (drafts_.size() < tasks_.size()) drafts_.resize(tasks_.size());
  for (std::vector<int32_t>& draft : drafts_) draft.clear();
  if (tasks_.empty()) return;
  int64_t elapsed_us = 0;
  try {
    const Stopwatch watch(elapsed_us);
    drafter_->draft(tasks_, std::span(drafts_).first(tasks_.size()));
  } catch (const std::exception& error) {
    switch_off(error);
    for (std::vector<int32_t>& draft : drafts_) draft.clear();
    return;
  }
  int32_t longest = 0;
  for (size_t i = 0; i < tasks_.size(); ++i) {
    std::vector<int32_t>& draft = drafts_[i];
    const auto is_bad = [&](int32_t id) { return id < 0 || id >= vocab_size_; };
    draft.erase(std::ranges::find_if(draft, is_bad), draft.end());
    if (std::ssize(draft) > tasks_[i].max_tokens)
      draft.resize(static_cast<size_t>(tasks_[i].max_tokens));
    longest = std::max(longest, tasks_[i].max_tokens);
  }
  if (longest > 0) controller_.note_draft(longest, static_cast<double>(elapsed_us), wants_trees_);
}

// What was drawn since a tree was guessed says which of its choices were right, whether they ran or
// not.
void Speculator::learn_choices(const Sequence& sequence, DraftHistory& kept) {
  if (kept.tree.nodes.empty() || sequence.num_tokens() <= kept.tree_position) return;
  kept.tree.note_drawn(
      std::span(sequence.token_ids).subspan(static_cast<size_t>(kept.tree_position)), rates_);
  kept.tree.nodes.clear();
}

// Which paths run beside the tasks' own guesses.
void Speculator::choose_branches(int64_t num_rows) {
  int64_t num_all = num_rows;
  double tokens = static_cast<double>(num_rows);
  int32_t depth = 0;
  for (size_t i = 0; i < tasks_.size(); ++i) {
    own_tokens_ = 0;
    if (tasks_[i].tree != nullptr) list_paths(i);
    num_all += std::ssize(drafts_[i]);
    tokens += own_tokens_;
    depth = std::max(depth, tasks_[i].max_tokens);
  }
  std::vector<BranchOffer*> offers;
  for (Path& path : paths_) {
    path.offer.is_taken = !config_.is_adaptive;
    offers.push_back(&path.offer);
  }
  if (config_.is_adaptive) controller_.choose_branches(offers, num_rows, num_all, tokens, depth);
  if (max_exact_rows_ == 0) return;
  for (Path& path : paths_) {  // as plan() has it
    path.offer.is_taken &= num_all + path.offer.num_rows <= max_exact_rows_;
    if (path.offer.is_taken) num_all += path.offer.num_rows;
  }
}

// A path for each leaf of the tree, but the one that the task's own guesses end in. Of a tree that
// is not given the likeliest guesses are kept, as EAGLE-2 has it (Li et al. 2024, arXiv
// 2406.16858).
void Speculator::list_paths(size_t task_idx) {
  const DraftTree* const tree = drafter_->tree(task_idx);
  if (tree == nullptr || tree->nodes.empty()) return;
  const size_t count = tree->nodes.size();
  tree->fill_survival(rates_, survival_);
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [&](int32_t node) { return survival_[static_cast<size_t>(node)]; });
  if (config_.token_tree.empty() && count > static_cast<size_t>(config_.tree_size))
    order.resize(static_cast<size_t>(config_.tree_size));
  is_kept_.assign(count, false);
  for (const int32_t node : order) is_kept_[static_cast<size_t>(node)] = true;
  // The task's own: the first choice of each place.
  std::vector<bool> is_counted(count, false);
  std::vector<int32_t>& own = drafts_[task_idx];
  int32_t last = -1;
  size_t num_own = 0;
  for (size_t node = 0; node < count && num_own < own.size(); ++node) {
    if (tree->nodes[node].parent != last || tree->nodes[node].rank != 0) continue;
    if (!is_kept_[node]) break;
    last = static_cast<int32_t>(node);
    is_counted[node] = true;
    own_tokens_ += survival_[node];
    ++num_own;
  }
  own.resize(num_own);
  std::vector<bool> is_leaf = is_kept_;
  for (size_t node = 0; node < count; ++node) {
    const int32_t parent = tree->nodes[node].parent;
    if (is_kept_[node] && parent >= 0) is_leaf[static_cast<size_t>(parent)] = false;
  }
  for (const int32_t leaf : order) {
    if (!is_leaf[static_cast<size_t>(leaf)] || is_counted[static_cast<size_t>(leaf)]) continue;
    Path path{.task_idx = task_idx, .token_ids = tree->path_to(leaf)};
    for (int32_t node = leaf; node >= 0 && !is_counted[static_cast<size_t>(node)];
         node = tree->nodes[static_cast<size_t>(node)].parent) {
      is_counted[static_cast<size_t>(node)] = true;
      path.offer.tokens += survival_[static_cast<size_t>(node)];
      ++path.num_own;
    }
    path.offer.num_rows = 1 + std::ssize(path.token_ids);
    paths_.push_back(std::move(path));
  }
  const auto found = kept_.find(tasks_[task_idx].request_id);
  if (found == kept_.end()) return;
  DraftHistory& kept = found->second[static_cast<size_t>(tasks_[task_idx].sample_index)];
  kept.tree = *tree;
  kept.tree_position = std::ssize(tasks_[task_idx].token_ids);
}

void Speculator::switch_off(const std::exception& error) {
  has_failed_ = true;
  notice_ = concat("speculative_config: the drafter ", kind_.name,
                   " failed and is switched off; requests go on without it: ", error.what());
}

void Speculator::take_states(const StepPlan& plan, const Tensor& states) {
  if (has_failed_) return;
  try {
    drafter_->take_states(plan, states);
  } catch (const std::exception& error) {
    switch_off(error);
  }
}

void Speculator::note_step(int32_t num_tokens, int32_t num_prefill_tokens, int64_t elapsed_us) {
  if (num_tokens == 0 || num_prefill_tokens > 0) return;
  controller_.note_step(num_tokens, static_cast<double>(elapsed_us));
}

void Speculator::note_outcomes(std::span<const DraftOutcome> outcomes) {
  for (const DraftOutcome& outcome : outcomes) {
    const auto found = kept_.find(outcome.request_id);
    if (found == kept_.end()) continue;
    DraftHistory& kept = found->second[static_cast<size_t>(outcome.sample_index)];
    controller_.note_outcome(kept, outcome.num_drafted, outcome.num_accepted, outcome.is_cut);
    look_for_mismatch(outcome);
  }
}

// Over many steps: a single text may be hard to guess.
void Speculator::look_for_mismatch(const DraftOutcome& outcome) {
  if (has_told_mismatch_ || !kind_.has_weights()) return;
  if (outcome.num_accepted > 0) ++num_first_right_;
  if (++num_first_guesses_ < kMismatchTries) return;
  const double rate =
      static_cast<double>(num_first_right_) / static_cast<double>(num_first_guesses_);
  num_first_guesses_ = num_first_right_ = 0;
  if (rate >= kMismatch) return;
  has_told_mismatch_ = true;
  notice_ = concat("speculative_config: of the first tokens that ", kind_.name, " guessed only ",
                   std::lround(100 * rate),
                   " % were right, where a matching draft has 60 % or "
                   "more: is ",
                   config_.model, " trained for this model and this kind of text?");
}

void Speculator::take_output(const TokenEvent& event) {
  if (has_failed_ || event.token_ids.empty()) return;
  drafter_->take_output(event.request_id, event.sample_index, event.token_ids, event.num_generated);
}

void Speculator::forget(RequestId request_id, int32_t sample_index, bool is_last) {
  drafter_->forget(request_id, sample_index, is_last);
  if (is_last) kept_.erase(request_id);
}

}  // namespace llmserve
