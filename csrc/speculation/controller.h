// How many tokens of each sequence are guessed in the next step, none included: as many as make
// tokens come soonest, by what steps were measured to take and how often guesses were right.
//
//   gain = (1 + sum of survival / R) / ((t(R + guesses) + d) / t(R))
//
// R are the rows of the plain step, survival is how likely a guess and all before it are right, t
// the time of a step by rows (StepTimes), d what guessing takes. Acceptance alone knows nothing of
// cost. The choice never changes a token. What does not pay is tried again from time to time.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "api/speculation_config.h"
#include "speculation/acceptance.h"
#include "speculation/draft_tree.h"
#include "speculation/step_times.h"

namespace llmserve {

// What is known of one sequence's guesses.
struct DraftHistory {
  Acceptance acceptance;
  int32_t num_planned = 0;  // guesses of this step
  int32_t max_planned = 0;  // that there can be, set by the caller
  int32_t num_trials = 0;   // steps for which it is still to be tried, whatever is known of it
  // The last tree that was guessed, behind so many tokens, until it is known what was drawn.
  DraftTree tree;
  int64_t tree_position = 0;
};

// A path of a tree that may run beside a sequence's own guesses.
struct BranchOffer {
  double tokens = 0;     // that it gives on average
  int64_t num_rows = 0;  // that it takes
  bool is_taken = false;
};

class SpeculationController {
 public:
  explicit SpeculationController(const SpeculationConfig& config) : config_(config) {}

  // Sets num_planned of each sequence whose tokens may be guessed, at most its max_planned.
  // num_rows: of the plain step, at least as many as sequences.
  void plan(std::span<DraftHistory* const> sequences, int64_t num_rows);
  // Whether the next guesses are to be trees: as long as what their branches gain is more than what
  // it takes to guess them. The other kind is tried from time to time.
  bool wants_trees();
  // Sets is_taken of the offers that make tokens come sooner, in a step that has num_all rows and
  // gives `tokens` without them; num_rows of the plain step.
  void choose_branches(std::span<BranchOffer* const> offers, int64_t num_rows, int64_t num_all,
                       double tokens, int32_t depth);
  // Tokens that a row more has to give for its time.
  double row_price(int64_t num_rows) const;
  // Of the last plan(): foreseen tokens a second by those of plain steps; 0 if nothing is known.
  double gain() const { return gain_; }

  // A step without prompts: all its rows, and its time without that of guessing.
  void note_step(int64_t num_rows, double elapsed_us) { times_.add(num_rows, elapsed_us); }
  // Guessing at most num_tokens tokens of each sequence took so long; are_trees: with others beside
  // them.
  void note_draft(int32_t num_tokens, double elapsed_us, bool are_trees = false);
  void note_outcome(DraftHistory& sequence, int32_t num_drafted, int32_t num_accepted, bool is_cut);

 private:
  struct Row {
    size_t sequence = 0;
    int32_t place = 0;
    double survival = 0;
  };

  double draft_us(int32_t num_tokens, bool are_trees = false) const;
  int64_t max_rows() const;
  double verify_us(int64_t num_rows, int64_t num_all) const;
  void list_rows(std::span<DraftHistory* const> sequences, int32_t max_tokens);
  size_t choose_rows(int64_t num_rows, int64_t num_trial_rows);
  void begin_trial(std::span<DraftHistory* const> sequences, int32_t max_tokens);

  const SpeculationConfig& config_;
  StepTimes times_;
  Acceptance all_;
  // Of chains and of trees, by the number of tokens; 0: not measured.
  std::array<std::array<double, kMaxDraftTokens + 1>, 2> draft_us_{};
  double tree_gain_ = 0;  // by branches, as a share
  double tree_cost_ = 0;  // of guessing them, likewise
  int64_t num_tree_questions_ = 0;
  double gain_ = 0;
  bool is_on_ = true;            // the last plan had guesses beside trials
  int64_t num_plans_ = 0;        // what counts as steps here
  int64_t num_since_plain_ = 0;  // plans with guesses
  int64_t plain_interval_ = 0;
  int64_t num_since_trial_ = 0;  // plans in which a sequence had no guesses
  int64_t trial_interval_ = 0;
  std::vector<Row> rows_;  // of the call under way
};

}  // namespace llmserve
