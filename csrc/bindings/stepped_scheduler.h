// The scheduler as Python steps it: `llmserve.Scheduler`, on a clock that stands still until it is
// told otherwise. Misuse that inside the engine would be a bug of ours is the caller's here.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "scheduler/scheduler.h"

namespace llmserve {

// A sequence of a plan with its tokens and tables.
struct ScheduledSequenceRecord : ScheduledSequence {
  std::vector<int32_t> token_ids;            // [q]
  std::vector<std::vector<int32_t>> tables;  // [cache groups], what block_tables points to
};

// A plan with what its spans point to, so that Python may keep it after the commit.
struct StepPlanRecord {
  explicit StepPlanRecord(const StepPlan& given);
  StepPlanRecord(const StepPlanRecord&) = delete;

  // Without arrays: no embeddings, nothing pooled. Contexts of rows are there until the commit.
  StepPlan plan;
  std::vector<ScheduledSequenceRecord> sequences;  // [B]
  std::deque<std::vector<int32_t>> banned_token_ids;
  std::deque<SamplingParams> params;
};

// What the scheduler knows of an unfinished sequence.
struct SequenceRecord {
  RequestId request_id = 0;
  int32_t sample_index = 0;
  std::string state;
  std::vector<int32_t> token_ids;
  int64_t num_prompt_tokens = 0;
  int64_t num_computed = 0;
  int64_t num_scheduled = 0;
  int32_t num_preemptions = 0;
  std::vector<std::vector<int32_t>> block_tables;  // [cache groups], or empty
};

class SteppedScheduler {
 public:
  SteppedScheduler(const SchedulerConfig& config, const CacheConfig& cache,
                   std::optional<Vocabulary> vocabulary, SchedulerOptions options = {});

  // The request arrives now.
  void add(Request request);
  std::unique_ptr<StepPlanRecord> schedule();
  std::vector<TokenEvent> commit(const SampledTokens& sampled);
  void preempt(RequestId id);
  void fail_step(const std::string& reason);
  // The steps in flight went with it.
  void lose_rank(int32_t rank);
  void fail(const std::string& reason);
  // None: only an arrival or an abort changes anything.
  std::optional<int64_t> wake_us() const;
  std::vector<SequenceRecord> sequences() const;
  EngineMetrics metrics() const;
  int32_t ref_count(int32_t block) const;

  int64_t now_us() const { return clock_.now_us(); }
  void advance_us(int64_t delta_us);

  Scheduler& scheduler() { return scheduler_; }
  const Scheduler& scheduler() const { return scheduler_; }

 private:
  void check_token_ids(const char* field, std::span<const int32_t> token_ids) const;

  ManualClock clock_;
  std::optional<Vocabulary> vocabulary_;
  Scheduler scheduler_;
  std::deque<size_t> num_rows_due_;  // of the steps in flight, the oldest first
};

}  // namespace llmserve
