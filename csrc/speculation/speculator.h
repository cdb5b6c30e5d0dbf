// Between two steps: whose next tokens are guessed, how many, and what became of the guesses. The
// engine's thread alone uses it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api/speculation_config.h"
#include "scheduler/news.h"
#include "scheduler/running_set.h"
#include "scheduler/step_plan.h"
#include "speculation/controller.h"
#include "speculation/drafter.h"
#include "speculation/registry.h"

namespace llmserve {

class Speculator {
 public:
  // Throws NotSupported for an unknown method, and what the drafter's make throws. `drafter` is
  // used in the place of the method's own; null: that one.
  Speculator(const SpeculationConfig& config, const DrafterContext& context, int64_t max_model_len,
             std::unique_ptr<Drafter> drafter = nullptr);

  // Whether the tokens of such a request may be guessed: logits processors are code of the user's,
  // which guesses would be handed, too.
  static bool can_draft(const Request& request);
  // Whether the guesses of such a request may be a tree: what edits its rows knows them by how many
  // guesses there are before each.
  static bool can_branch(const SamplingParams& params);

  // Before a step: guesses for the sequences that run, each given to `take`; and why, where there
  // is a word to be said.
  void propose(const RunningSet& running, const std::function<void(DraftReady)>& take,
               std::vector<Decision>& decisions);
  // After a step of num_tokens rows, which took so long.
  void note_step(int32_t num_tokens, int32_t num_prefill_tokens, int64_t elapsed_us);
  void note_outcomes(std::span<const DraftOutcome> outcomes);

  void begin(const Request& request) { drafter_->begin(request); }
  void take_output(const TokenEvent& event);
  // Behind a step of the target: the states that the drafter wants.
  void take_states(const StepPlan& plan, const Tensor& states);
  void forget(RequestId request_id, int32_t sample_index, bool is_last);
  void reset() { drafter_->reset(); }
  Drafter& drafter() { return *drafter_; }
  int64_t num_sequences() const;  // of which something is kept

  // The drafter failed and is used no more.
  bool has_failed() const { return has_failed_; }
  // What its user should be told, once: a drafter that failed or that does not match; empty:
  // nothing new.
  std::string take_notice() { return std::exchange(notice_, {}); }

 private:
  struct Candidate {
    const Sequence* sequence = nullptr;
    DraftHistory* kept = nullptr;
  };

  void find_candidates(const RunningSet& running);
  DraftTask task_of(const Candidate& candidate, int32_t max_tokens) const;
  void draft(int64_t num_rows);
  void plan(int64_t num_rows);
  void call_drafter();
  void learn_choices(const Sequence& sequence, DraftHistory& kept);
  void choose_branches(int64_t num_rows);
  void list_paths(size_t task_idx);
  void switch_off(const std::exception& error);
  void look_for_mismatch(const DraftOutcome& outcome);

  const SpeculationConfig config_;
  const int64_t max_model_len_;
  const int64_t vocab_size_;
  const int64_t max_exact_rows_;
  const DrafterKind& kind_;
  const std::unique_ptr<Drafter> drafter_;
  SpeculationController controller_;
  ChoiceRates rates_;
  TreeRequest tree_request_;
  bool wants_trees_ = false;                                       // of the call under way
  std::unordered_map<RequestId, std::vector<DraftHistory>> kept_;  // by sample
  bool has_failed_ = false;
  bool has_told_mismatch_ = false;
  int64_t num_first_guesses_ = 0;  // since it was last looked at
  int64_t num_first_right_ = 0;    // of them
  std::string notice_;
  // Of the call under way.
  std::vector<Candidate> candidates_;
  std::vector<DraftHistory*> histories_;
  std::vector<DraftTask> tasks_;
  std::vector<std::vector<int32_t>> drafts_;  // [tasks]
  // Of a tree, a path beside its task's guesses.
  struct Path {
    size_t task_idx = 0;
    std::vector<int32_t> token_ids;
    int32_t num_own = 0;  // guesses that no path before has
    BranchOffer offer;
  };
  std::vector<Path> paths_;
  std::vector<double> survival_;  // of a tree's nodes
  std::vector<bool> is_kept_;     // likewise
  double own_tokens_ = 0;         // that the tasks' own guesses give on average
};

}  // namespace llmserve
