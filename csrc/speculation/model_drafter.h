// Guesses by a smaller model, drawn as the target will draw: with the request's seed, positions,
// filters and edits. Two models that see the same noise agree more often than their distributions
// overlap by chance (Daliri, Musco, Suresh 2024, arXiv 2408.07978): a guess is as often right as
// under the optimal rejection rule, less a percent.
//
// It has a KV pool of its own. What was guessed and accepted is there already; the rest a sequence
// lacks when its turn comes is computed then, in the same step as its first guess. So a sequence
// that was not guessed for long, was preempted or came from another's prefix needs nothing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "kv_cache/kv_cache_manager.h"
#include "scheduler/step_plan.h"
#include "speculation/draft_model.h"
#include "speculation/drafter.h"
#include "speculation/vocabulary_map.h"

namespace llmserve {

class ModelDrafter final : public Drafter {
 public:
  // `model` outlives it. map: where the model has another vocabulary than the target; it then
  // guesses the most likely token that both have, whatever the request's parameters.
  ModelDrafter(DraftModel& model, DraftSampling sampling,
               std::shared_ptr<const VocabularyMap> map = nullptr);

  void draft(std::span<const DraftTask> tasks, std::span<std::vector<int32_t>> drafts) override;
  const DraftTree* tree(size_t task_idx) const override { return &trees_[task_idx]; }
  void forget(RequestId request_id, int32_t sample_index, bool is_last) override;
  int64_t num_sequences() const override { return static_cast<int64_t>(entries_.size()); }
  void reset() override;
  // For tests.
  void check_integrity() const;

 private:
  // What is kept of a sequence.
  struct Entry {
    BlockTable table;
    std::vector<int32_t> token_ids;  // the model's: known ones, then guesses of the last call
    int64_t num_known = 0;
    int64_t num_computed = 0;  // of token_ids: in the pool
    SamplingParams params;     // as the target's, without what is only reported
    int64_t last_used = 0;     // by num_calls_
    // Where there is a map: the target's tokens, as far as they came, in the model's vocabulary.
    std::vector<int32_t> mapped;
    size_t num_mapped = 0;  // of the target's
  };
  // Of a tree, a path that is gone on from, beside the one that the task's guesses are.
  struct Twig {
    TreeTip tip;
    BlockTable table;  // of all before its last guess
  };
  // A task under way.
  struct Job {
    const DraftTask* task = nullptr;
    Entry* entry = nullptr;
    std::vector<int32_t>* draft = nullptr;
    DraftTree* tree = nullptr;
    bool is_done = false;
    TreeTip tip = {};  // of the tree: the last guess of `draft`
    std::vector<Twig> twigs = {};
  };
  // Whose a row of the model's step is: the task's own guess, or a twig's.
  struct RowOwner {
    Job* job = nullptr;
    int32_t twig = -1;
  };
  // A guess of a tree behind which others may be.
  struct Bud {
    TreeTip tip;
    const BlockTable* table = nullptr;  // of all before it
  };

  Entry& entry_of(const DraftTask& task);
  SamplingParams params_of(const DraftTask& task) const;
  std::span<const int32_t> known_tokens(const DraftTask& task, Entry& entry) const;
  bool begin(Job& job);
  bool make_room(const Entry& entry, int64_t num_new_tokens);
  bool run_step();
  void plan_tokens(Job& job, int64_t num_tokens);
  void plan_twig(Job& job, size_t twig_idx);
  LogitRow row_of(const Job& job, int64_t position) const;
  int32_t num_choices(const Job& job, int32_t node) const;
  void take_rows(const SampledTokens& sampled);
  void take_guess(Job& job, const SampledToken& token);
  bool ends_text(const DraftTask& task, int32_t token_id, int64_t num_guesses) const;
  void grow(const RowOwner& owner, std::span<const DraftChoice> choices);
  void choose_twigs(Job& job);
  void drop_twigs(Job& job);
  void let_go(Entry& entry);

  DraftModel& model_;
  const DraftSampling sampling_;
  const std::shared_ptr<const VocabularyMap> map_;
  KvCacheManager kv_cache_;
  std::map<std::pair<RequestId, int32_t>, Entry> entries_;  // by request and sample
  int64_t num_calls_ = 0;
  // Of the call under way.
  int64_t num_to_catch_up_ = 0;  // tokens that may still be
  std::vector<Job> jobs_;
  StepPlan plan_;
  std::vector<DraftContext> contexts_;  // [S]
  std::vector<RowOwner> owners_;        // [S]
  std::vector<DraftTree> trees_;        // [tasks]
  std::vector<Bud> buds_;
};

}  // namespace llmserve
