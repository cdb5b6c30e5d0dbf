// One stream of tokens: a prompt and what was generated after it. A request with n samples is n
// sequences that share blocks; there is no group object. Its life is in sequence_state.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "api/request.h"
#include "api/token_event.h"
#include "core/prefetch.h"
#include "kv_cache/block_table.h"
#include "scheduler/beam.h"
#include "scheduler/repetition_detector.h"
#include "scheduler/sequence_state.h"
#include "text/stop_checker.h"

namespace llmserve {

// What the sequences of one request have in common.
struct RequestContext {
  Request request;
  int64_t service_key = 0;              // SchedulingPolicy::service_key
  int64_t order = 0;                    // of arrival: 0, 1, 2 …
  std::vector<int32_t> stop_token_ids;  // end a sequence, and banned before min_tokens
  StopStrings stop_strings;
  int32_t num_unfinished = 0;  // samples without a last event, those not forked yet included
  // Of the prompt's tokens from the second on, as far as they have been run; they outlive a
  // preemption and leave with the first event after the prompt.
  std::vector<TokenLogprob> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_top_logprobs;
  int64_t num_scored = 0;                    // prompt tokens whose logprob is known
  std::vector<FinishedBeam> finished_beams;  // the best of them, best first

  // Prompt tokens whose logprob is wanted and not known yet; the first is prompt token
  // num_scored + 1, found in the logits of the one before.
  int64_t num_to_score() const {
    if (!request.params.prompt_logprobs) return 0;
    return static_cast<int64_t>(request.prompt_token_ids.size()) - 1 - num_scored;
  }
};

// Another guess of a sequence's next tokens, beside `drafts`. It runs in blocks of its own from the
// newest token on, and either becomes the sequence's or leaves nothing behind.
struct DraftBranch {
  std::vector<int32_t> token_ids;
  BlockTable table;           // without blocks where it is in no step
  int32_t sequence_idx = -1;  // of the step in flight: into StepPlan::sequences
  size_t first_row = 0;       // likewise, into StepPlan::logit_rows
  int32_t num_own = 0;        // tokens behind those that an earlier guess begins with, too
};

// The scheduler alone writes a sequence. Fields that each decode step reads come first and repeat
// what the request says of them: between two steps nothing stays in the CPU's caches, and the
// request is a kilobyte more.
//
//   0 ............ num_computed ......... num_scheduled ......... num_tokens + num_awaited
//   in the KV pool             in steps in flight         not yet run
//
// A decoding sequence is one with a single token to run: the newest. Drafted tokens run behind it:
// while they are in flight, num_scheduled is num_tokens + num_drafted.
struct alignas(kCacheLineBytes) Sequence {
  RequestContext* context = nullptr;
  RequestId request_id = 0;
  uint64_t seed = 0;
  int32_t sample_index = 0;
  // Samples whose next token comes from this sequence's logits: the first sequence of a request
  // runs the prompt for all n and forks then.
  int32_t num_samples = 1;
  SequenceState state = SequenceState::kWaiting;  // written by RequestBook alone
  bool is_abort_requested = false;  // takes effect when no step in flight runs its request
  bool was_admitted = false;        // has run, or was forked from one that has
  bool is_streamed = true;          // false: one event, at the end
  bool makes_text = false;          // `text` is there
  bool has_received = false;        // what was to come from a peer has come, or will not
  bool is_to_send = false;          // it has ended so that its blocks go to a peer
  bool has_drafter = false;         // it is not run ahead, so that its tokens can be guessed
  // Only tokens and their text are wanted: no beams, logprobs or pooled states, no prompt of
  // embeddings, no search for repetitions.
  bool is_plain = true;
  std::vector<int32_t> token_ids;  // prompt, then generated
  int64_t num_prompt_tokens = 0;
  int64_t num_computed = 0;   // committed
  int64_t num_scheduled = 0;  // num_computed and the steps in flight
  // Prompt tokens that were ever run or found in the cache; a preemption does not lower it.
  int64_t num_prompt_seen = 0;
  // Tokens that steps in flight draw, and that a later step may run before they are known here.
  int64_t num_awaited = 0;
  int32_t awaited_row = -1;   // the logit row of the newest step in flight that draws the last
  int32_t num_in_flight = 0;  // steps that run this sequence
  int32_t num_drafted = 0;    // tokens of the step in flight that are guesses
  // Masks that were not there when its last token ran, and are not yet. It runs again then.
  int32_t num_awaited_masks = 0;
  int32_t max_tokens = 0;  // of the request, as the next two
  int32_t min_tokens = 0;
  int32_t num_resumed = 0;  // generated tokens that the request brought
  int32_t adapter = -1;     // the index of the request's; -1: none
  std::span<const int32_t> stop_token_ids;
  RequestTimes times;
  int64_t num_cached_tokens = 0;  // of the prompt, read from the prefix cache when first admitted
  int32_t num_preemptions = 0;
  int32_t num_drafts = 0;  // tokens of `drafts`
  // Of a sequence that is not streamed: text and logprobs up to now; null before its first token.
  std::unique_ptr<TokenEvent> withheld;
  BlockTable table;

  std::optional<StopChecker> text;    // absent: no text was asked for
  std::vector<int32_t> drafts;        // guessed to follow token_ids, for the next step
  std::vector<DraftBranch> branches;  // for the next step, then of the one in flight
  Beam beam;                          // of a beam search
  std::optional<RepetitionDetector> repetition;
  int64_t num_draft_tokens = 0;     // guesses that were run
  int64_t num_accepted_tokens = 0;  // of them, those that were right

  // The first bytes, which each decode step reads, beside `text`.
  static constexpr size_t kNumHotBytes = 4 * kCacheLineBytes;

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_generated() const { return num_tokens() - num_prompt_tokens; }
  std::span<const int32_t> generated() const {
    return std::span(token_ids).subspan(static_cast<size_t>(num_prompt_tokens));
  }
  int64_t num_to_run() const { return num_tokens() + num_awaited + num_drafted - num_scheduled; }
  bool is_ended() const { return state == SequenceState::kFinished; }
  const SamplingParams& params() const { return context->request.params; }
  bool is_decoding() const { return num_to_run() == 1; }
  // A beam with candidates runs nothing until the other beams of its request have theirs, even
  // where it gave its blocks back.
  bool has_candidates() const { return !is_plain && beam.candidates != nullptr; }
};

// The order in which sequences are served: key, arrival, sample. Strict and total.
struct ServedBefore {
  bool operator()(const Sequence* a, const Sequence* b) const {
    if (a->context->service_key != b->context->service_key)
      return a->context->service_key < b->context->service_key;
    if (a->context->order != b->context->order) return a->context->order < b->context->order;
    return a->sample_index < b->sample_index;
  }
};

}  // namespace llmserve
