// What each of the last steps did, how long its phases took, and why each sequence ran or waited;
// and what became of the last requests.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "api/request.h"
#include "api/token_event.h"
#include "core/prefetch.h"
#include "scheduler/step_plan.h"

namespace llmserve {

// A step is "prefill" if it ran any prompt token, "decode" if it ran others, and "idle" if nothing
// could run: only its decisions count then. Times are on the engine's clock.
struct StepRecord {
  int32_t replica = 0;  // the engine's, of several
  int64_t step_id = 0;
  int64_t start_us = 0;
  int64_t draft_us = 0;  // durations of the phases
  int64_t schedule_us = 0;
  int64_t execute_us = 0;
  int64_t wait_us = 0;  // of execute_us: for a device; the rest is the host's own time
  int64_t commit_us = 0;
  int32_t num_sequences = 0;
  int32_t num_tokens = 0;
  int32_t num_prefill_tokens = 0;
  int32_t num_in_flight = 0;        // steps, with this one, when it began
  int32_t num_draft_tokens = 0;     // of num_tokens, guesses
  int32_t num_accepted_tokens = 0;  // of them, those that were right
  // After the step: sequences, and blocks of the KV pool that sequences refer to.
  int64_t num_running = 0;
  int64_t num_waiting = 0;
  int64_t num_blocks_used = 0;
  std::vector<Decision> decisions;

  std::string_view phase() const {
    if (num_sequences == 0) return "idle";
    return num_prefill_tokens > 0 ? "prefill" : "decode";
  }
};

// Times are on the engine's clock, 0 where it has not happened. What each token changes comes
// first, and is one line of the caches in a StepTrace.
struct RequestRecord {
  RequestId request_id = -1;
  int64_t scheduled_us = 0;    // of all samples the first
  int64_t first_token_us = 0;  // likewise
  int64_t last_token_us = 0;   // of all samples the last
  int64_t num_cached_tokens = 0;
  int64_t num_generation_tokens = 0;  // of all samples
  int32_t num_preemptions = 0;
  int32_t num_samples = 1;

  int64_t arrival_us = 0;
  int64_t queued_us = 0;  // taken in by the engine's thread
  int64_t finished_us = 0;
  int64_t num_prompt_tokens = 0;
  FinishReason finish_reason = FinishReason::kNone;  // of the sample that ended last
  int32_t replica = 0;                               // the engine's, of several
  // Another one could not execute it, and it goes on here since then. -1: none.
  int32_t former_replica = -1;
  int64_t taken_over_us = 0;
  int64_t num_draft_tokens = 0;     // of all samples: guesses that were run
  int64_t num_accepted_tokens = 0;  // of them, those that were right
};

// Rings; the oldest records go first. Written by the engine thread, read by any.
class StepTrace {
 public:
  StepTrace(size_t num_steps, size_t num_requests, int32_t replica)
      : replica_(replica), steps_(num_steps), requests_(num_requests) {}

  // Takes its decisions, and leaves the memory of a record that has gone for the next ones.
  void record(StepRecord& step);
  void begin(const Request& request, int64_t now_us);
  void update(const StepResult& result, int64_t now_us);
  // The record of a request that goes on at another replica, to be entered there; none: a later
  // one has its place.
  std::optional<RequestRecord> take(RequestId id);
  void enter(RequestRecord record, int64_t now_us);

  // What is still there, oldest first.
  std::vector<StepRecord> steps() const;
  std::vector<RequestRecord> requests() const;
  std::optional<RequestRecord> request(RequestId id) const;

 private:
  void note_admissions(const StepRecord& step);

  const int32_t replica_;
  mutable std::mutex mutex_;
  struct alignas(kCacheLineBytes) Place : RequestRecord {};
  RequestRecord& place_of(RequestId id) {
    return requests_[static_cast<size_t>(id) % requests_.size()];
  }

  std::vector<StepRecord> steps_;  // record i of all time is at i % size
  size_t num_recorded_ = 0;
  std::vector<Place> requests_;  // request i is at i % size
};

}  // namespace llmserve
