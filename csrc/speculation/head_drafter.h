// Guesses by a head on the target's hidden states, drawn as the target will draw.
//
// Behind each step the states of its tokens are kept until the head has run them: at once where a
// prompt was run, and with the next guess otherwise. Its rows are in a KV pool of its own, in the
// order in which they came. What the head never sees leaves a gap there, over which it looks: the
// tokens of a prefix that the target found in its cache and the head did not, and those that nobody
// guessed behind. Where guessing is off, states are kept of the newest tokens and cost a copy.
//
// Where a file has several layers, each guesses a place: the second reads what the first gave, and
// the token two behind, and so on. A row stays in the pool when all have run it with tokens that
// are certain; the newest run again with the next guesses.
//
// A row reads the token behind its own, so that blocks are found by the tokens from the second on,
// and the first is part of their root.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kv_cache/kv_cache_manager.h"
#include "speculation/drafter.h"
#include "speculation/head_model.h"

namespace llmserve {

class HeadDrafter final : public Drafter {
 public:
  // `model` outlives it.
  HeadDrafter(HeadModel& model, DraftSampling sampling);

  void draft(std::span<const DraftTask> tasks, std::span<std::vector<int32_t>> drafts) override;
  const DraftTree* tree(size_t task_idx) const override { return &trees_[task_idx]; }
  std::vector<int32_t> wanted_layers() const override { return model_.wanted_layers(); }
  void take_states(const StepPlan& plan, const Tensor& states) override;
  void begin(const Request& request) override;
  void forget(RequestId request_id, int32_t sample_index, bool is_last) override;
  int64_t num_sequences() const override { return std::ssize(prompts_); }
  void reset() override;
  // For tests.
  void check_integrity() const;

 private:
  struct Prompt {
    std::vector<int32_t> token_ids;  // with those that were generated before
    std::string salt;
  };
  // The state of a guess of a branch that no path before it has.
  struct BranchState {
    int64_t position = 0;
    int32_t token_id = 0;
    int32_t parent = -1;  // of those before it; -1: the sequence's own path has the one before
    int32_t place = 0;    // of the model's
  };
  // What is kept of a sequence.
  struct Entry {
    BlockTable table;
    int64_t num_rows = 0;        // in the pool, each of a token that is certain
    int64_t next_position = 0;   // of the row behind them
    bool is_whole = true;        // they are those of positions 0, 1, 2 …
    bool has_looked_up = false;  // the table was given what the cache has
    // States of tokens from first_kept on, certain or guessed, and which tokens they were.
    int64_t first_kept = 0;
    std::vector<int32_t> kept;               // places of the model's
    std::vector<int32_t> token_ids;          // [kept]
    std::vector<BranchState> branch_states;  // of the newest step
    int64_t num_certain = 0;                 // tokens of the sequence that are
    std::optional<SamplingParams> params;
    int64_t last_used = 0;  // by num_calls_
    const Prompt* prompt = nullptr;

    int64_t end_kept() const { return first_kept + std::ssize(kept); }
  };
  // Of a tree, a path that is gone on from, beside the one that the task's guesses are.
  struct Twig {
    TreeTip tip;
    int32_t logit_row = -1;  // of the last run: the one that its last guess was drawn of
    BlockTable table;        // of all rows before that guess's
  };
  struct Job {
    const DraftTask* task = nullptr;
    Entry* entry = nullptr;
    std::vector<int32_t>* draft = nullptr;
    DraftTree* tree = nullptr;
    std::vector<int32_t> token_ids;  // [position] those of the task, then guesses
    int32_t logit_row = -1;          // of the last run
    bool is_done = false;
    // Where each place has its layer: the rows that run at all places, and where the last run had
    // them.
    int64_t first_row = 0;
    int64_t first_position = 0;
    int32_t num_rows = 0;
    int32_t run_begin = 0;
    int32_t num_places = 0;  // that ran
    TreeTip tip = {};
    std::vector<Twig> twigs = {};
  };
  // Whose a logit row is: the task's own guess, or a twig's.
  struct RowOwner {
    Job* job = nullptr;
    int32_t twig = -1;
  };
  // A guess of a tree behind which others may be.
  struct Bud {
    Job* job = nullptr;
    TreeTip tip;
    int32_t logit_row = -1;
    const BlockTable* table = nullptr;
  };

  Entry* entry_of(RequestId request_id, int32_t sample_index);
  void look_up(Entry& entry);
  bool is_too_long(const Entry& entry) const;
  void let_go(Entry& entry);
  void keep_states(const Tensor& states);       // those of to_keep_
  void drop_kept(Entry& entry, int64_t count);  // the oldest
  void cut_kept(Entry& entry, int64_t end);     // those from position `end` on
  void keep_branch(Entry& entry, const StepPlan& plan, const ScheduledSequence& branch);
  void settle_branches(Entry& entry, std::span<const int32_t> known);
  void drop_branches(Entry& entry);
  void shed();
  bool begin_job(Job& job);
  int64_t num_runnable(const Entry& entry) const;
  void plan_rows(Entry& entry, int64_t num_rows, std::span<const int32_t> token_ids);
  bool make_room(const Entry& entry, int64_t num_new_rows);
  void catch_up();
  void ask(Job& job, int32_t twig = -1);
  bool run_first();
  bool run_next();
  bool plan_guess(Job& job, int32_t twig, int32_t place);
  void plan_again(Job& job, int32_t place);
  void settle_rows(Job& job);
  void run_later_layers();
  void take_guesses(const SampledTokens& sampled);
  void take_guess(Job& job, const SampledToken& token);
  bool ends_text(const Job& job, int32_t token_id, int64_t num_guesses) const;
  void grow(Job& job, int32_t twig, int32_t logit_row);
  void choose_twigs(Job& job);
  void drop_twigs(Job& job);

  HeadModel& model_;
  const DraftSampling sampling_;
  const bool has_cache_;
  const int32_t num_layers_;
  KvCacheManager kv_cache_;
  std::map<RequestId, Prompt> prompts_;
  std::map<std::pair<RequestId, int32_t>, Entry> entries_;  // by request and sample
  std::vector<int32_t> free_;                               // places of kept states
  std::vector<int32_t> to_keep_;  // [T] of a step, whose states are not there yet; -1: none
  int64_t num_calls_ = 0;
  int64_t num_idle_steps_ = 0;  // that had tokens to be guessed behind, since it was asked
  std::vector<Job> jobs_;
  HeadStep step_;
  std::vector<RowOwner> owners_;                 // [S]
  std::vector<std::pair<Entry*, int64_t>> ran_;  // rows of catch_up(), for the later layers
  std::vector<DraftTree> trees_;                 // [tasks]
  std::vector<Bud> buds_;
};

}  // namespace llmserve
