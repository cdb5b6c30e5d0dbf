// commit(): what a step's tokens change. It is the only place that appends tokens, and that enters
// blocks in the prefix cache. Only blocks of accepted tokens enter it.
#pragma once

#include <array>
#include <cstdint>

#include "api/engine_config.h"
#include "api/engine_metrics.h"
#include "api/sampled_tokens.h"
#include "kv_cache/kv_cache_manager.h"
#include "scheduler/beam_search.h"
#include "scheduler/flight.h"
#include "scheduler/outbox.h"
#include "scheduler/policy.h"
#include "scheduler/request_book.h"

namespace llmserve {

class StepCommitter {
 public:
  // All outlive the committer.
  StepCommitter(const SchedulerConfig& config, SchedulingPolicy& policy, KvCacheManager& kv_cache,
                const RequestAdmission& admission, RequestBook& book, Outbox& outbox)
      : config_(config),
        policy_(policy),
        kv_cache_(kv_cache),
        book_(book),
        outbox_(outbox),
        beams_(config, admission, book, outbox) {}

  // `sampled` has one row for each logit row of the flight's plan, in order. Ended sequences that
  // no later step runs are left to RequestBook::drop_ended().
  void commit(const StepFlight& flight, const SampledTokens& sampled, int64_t now_us);
  // Forgets a commit that was cut off.
  void clear() { beams_.clear(); }

  int64_t num_generation_tokens() const { return num_generation_tokens_; }
  int64_t num_accepted_tokens() const { return num_accepted_tokens_; }
  void fill_metrics(EngineMetrics& metrics) const;

 private:
  // A sequence's part of the step. Logit rows [row, end_row) are the sequence's: first those of its
  // prompt, then one a sample, or one for the newest token and one for each drafted token.
  struct Share {
    const ScheduledSequence* scheduled = nullptr;
    std::span<const int32_t> drafts;
    size_t row = 0;
    size_t end_row = 0;
    int32_t num_others = 0;  // guesses on other paths
  };

  Share best_path(Sequence& sequence, Share share);
  int32_t count_right(const Share& share) const;
  std::span<const int32_t> drafts_of(const ScheduledSequence& scheduled) const;
  void prefetch_books(const StepFlight& flight) const;
  void commit(Sequence& sequence, Share share);
  int32_t count_awaited_masks(const Sequence& sequence, const Share& share) const;
  void cache_blocks(Sequence& sequence, int64_t num_computed);
  bool score_prompt_token(Sequence& sequence, const SampledToken& token);
  void finish_pooled(Sequence& sequence);
  void append_samples(Sequence& sequence, size_t row);
  void accept_drafts(Sequence& sequence, const Share& share);
  void drop_rejected(Sequence& sequence);
  void append_token(Sequence& sequence, const SampledToken& token);
  void report_logprobs(Sequence& sequence, const SampledToken& token, TokenEvent& news) const;
  FinishReason check_end(Sequence& sequence, bool is_end, TokenEvent& event) const;

  const SchedulerConfig& config_;
  SchedulingPolicy& policy_;
  KvCacheManager& kv_cache_;
  RequestBook& book_;
  Outbox& outbox_;
  BeamSearch beams_;

  // Of the current commit.
  const StepPlan* plan_ = nullptr;
  const SampledTokens* sampled_ = nullptr;
  int64_t now_us_ = 0;

  int64_t num_generation_tokens_ = 0;
  int64_t num_drafts_ = 0;
  int64_t num_draft_tokens_ = 0;
  int64_t num_accepted_tokens_ = 0;
  std::array<int64_t, kMaxDraftTokens> num_accepted_per_pos_{};
};

}  // namespace llmserve
