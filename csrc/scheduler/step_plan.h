// The records of one step: host integers only. A plan owns the tokens that it runs. Its spans point
// into sequences and stay valid until the next commit(), its other pointers until its own.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "api/request.h"
#include "api/token_event.h"
#include "kv_cache/block_table.h"
#include "kv_cache/state_slots.h"
#include "kv_cache/transfer.h"

namespace llmserve {

// One sequence's share of a step: its tokens run at positions [start_position, end_position()). The
// tokens are committed. A decoding sequence may instead have one awaited token, or a committed one
// with drafted ones behind it.
struct ScheduledSequence {
  RequestId request_id = 0;
  int32_t sample_index = 0;
  int32_t first_token = 0;  // into StepPlan::token_ids
  int32_t num_tokens = 0;   // q >= 1
  // The last of them are guesses, which commit() compares with what is drawn in their place. Each
  // guess has a logit row, and so has the token before the first guess.
  int32_t num_drafted = 0;
  // >= 0: another guess of what follows the newest token of this sequence of the plan, which it
  // runs again. Its block table is a fork of that one's.
  int32_t branch_of = -1;
  // >= 0: the one token is what this logit row of the step before draws, which is still in flight.
  int32_t awaited_row = -1;
  int64_t start_position = 0;  // tokens already in the KV cache
  // [cache groups][>= ceil((start + q) / P)] block ids: position p is in entry p / P, or kGone.
  std::span<const std::vector<int32_t>> block_tables;
  int32_t state_slot = kNoSlot;  // of models that have layers with a fixed state
  int32_t adapter = -1;          // index of the adapter that its tokens run with; -1: none
  bool is_prefill = false;       // false: exactly the one token that was generated last
  // [prompt tokens, E] or none: tokens at positions within it are rows of it.
  const HostArray* prompt_embeds = nullptr;

  int64_t end_position() const { return start_position + num_tokens; }
  int64_t num_known() const { return end_position() - num_drafted; }  // positions without guesses
};

// A sequence of the step whose hidden states are wanted.
struct PooledSequence {
  int32_t sequence_idx = 0;  // into StepPlan::sequences
  PooledOutput* output = nullptr;
};

// One row of logits to compute, and one token to draw from it or to look up in it. Several rows may
// belong to one token of the batch: the first tokens of a request's n samples come from one row of
// logits.
struct LogitRow {
  int32_t sequence_idx = 0;  // into StepPlan::sequences
  int32_t token_offset = 0;  // into that sequence's tokens
  RequestId request_id = 0;  // whose token this is
  int32_t sample_index = 0;
  uint64_t seed = 0;     // of that sample
  int64_t position = 0;  // of the token to be drawn: the number of tokens before it
  // >= 0: the prompt's token at that position, whose logprob is wanted; nothing is drawn.
  int32_t given_token_id = -1;
  const SamplingParams* params = nullptr;
  // [position - num_drafted] all tokens before it: prompt, then generated. This step's drafted
  // tokens stand between them and the row's token.
  std::span<const int32_t> token_ids;
  int32_t num_drafted = 0;
  int64_t num_prompt_tokens = 0;  // of token_ids
  std::span<const int32_t>
      banned_token_ids;  // not to be drawn (min_tokens); logprobs still count them
  // The next step may run the token before it is committed. Of a sequence with an awaited token,
  // `token_ids` lacks that one; SamplingParams::needs_newest_token() is false then.
  bool is_awaitable = false;

  // The token depends on the logits and the numbers of `params` alone, and nothing else is
  // reported.
  bool only_draws() const {
    return given_token_id < 0 && banned_token_ids.empty() && params->only_draws();
  }
};

// Why a sequence was, or was not, in the step.
enum class DecisionKind : uint8_t {
  kScheduled,         // runs; detail: tokens
  kAdmitted,          // left the queue; detail: prompt tokens found in the prefix cache
  kChunked,           // the budget cut its prompt; detail: tokens left
  kChunkedForPace,    // max_stall_us did, since others decode; detail: tokens left
  kChunkedToSpread,   // min_spread_tokens did, since there is time; detail: tokens left
  kPreempted,         // gave its blocks back; detail: blocks
  kWaitsForBudget,    // no tokens left in this step
  kWaitsForPace,      // none of those that max_stall_us leaves while others decode
  kWaitsToSpread,     // none of those that have to run by now
  kWaitsForSeqs,      // max_num_seqs are running
  kWaitsForBlocks,    // the pool is full; detail: blocks it lacks
  kWaitsForPrefix,    // another request is computing its next blocks; detail: that request
  kWaitsForBatch,     // the policy is filling a batch
  kWaitsForBeams,     // has its next tokens' candidates, other beams of its request have not
  kWaitsForStep,      // what it runs next depends on what a step in flight gives
  kWaitsForTransfer,  // its blocks come from a lower tier or a peer
  kDrafted,           // its next tokens were guessed; detail: tokens
  kDraftsOff,         // guessing its tokens does not pay; detail: the gain foreseen, in percent
  kWaitsForGrammar,   // its grammar is being compiled, or the mask of its next token is not there
};
std::string_view name(DecisionKind kind);

struct Decision {
  RequestId request_id = 0;
  int32_t sample_index = 0;
  DecisionKind kind = DecisionKind::kScheduled;
  int64_t detail = 0;
};

struct StepPlan {
  int64_t step_id = 0;
  std::vector<BlockCopy> copies;
  std::vector<StateCopy> state_copies;
  std::vector<Transfer> transfers;           // to begin beside the step, after those before it
  std::vector<int32_t> token_ids;            // [T] of all sequences in turn; kNoTokenId: awaited
  std::vector<ScheduledSequence> sequences;  // [B] those with a seat, then branches of some
  std::vector<LogitRow> logit_rows;          // [S], grouped by sequence, in order of position
  std::vector<PooledSequence> pooled;
  // Layers whose hidden states are wanted as they come in, in increasing order; the number of
  // layers stands for what leaves the last one.
  std::vector<int32_t> wanted_layers;
  std::vector<Decision> decisions;
  int32_t num_branches = 0;        // of `sequences`, the last
  int32_t num_prefill_tokens = 0;  // of num_tokens()
  // Of num_tokens(): run again after a preemption, the generated tokens before it included.
  int32_t num_recomputed_tokens = 0;
  int32_t num_tokens() const { return static_cast<int32_t>(token_ids.size()); }
  std::span<const int32_t> tokens_of(const ScheduledSequence& sequence) const {
    return std::span(token_ids).subspan(static_cast<size_t>(sequence.first_token),
                                        static_cast<size_t>(sequence.num_tokens));
  }
  // Without branches.
  int32_t num_sequences() const { return static_cast<int32_t>(sequences.size()) - num_branches; }
  // No sequence runs. Transfers may begin all the same.
  bool is_empty() const { return sequences.empty(); }
  // Something for an executor.
  bool has_work() const {
    return !sequences.empty() || !transfers.empty() || !state_copies.empty();
  }
  void clear();
};

// New tokens of a sequence, given out or not: what the engine's metrics and traces are made from.
struct TokenProgress {
  RequestId request_id = 0;
  int32_t sample_index = 0;
  int32_t num_tokens = 1;  // a search's beams have theirs at its end
  int32_t num_preemptions = 0;
  int64_t num_cached_tokens = 0;
  int64_t previous_us = 0;  // its token before; 0: these are its first
  RequestTimes times;
};

// What became of a sequence's guesses.
struct DraftOutcome {
  RequestId request_id = 0;
  int32_t sample_index = 0;
  int32_t num_drafted = 0;  // on the path of which most was right
  int32_t num_others = 0;   // on other paths
  int32_t num_accepted = 0;
  bool is_cut = false;  // the sequence ended with the last accepted one: the next was not looked at
};

struct StepResult {
  std::vector<TokenEvent> events;       // to be given out
  std::vector<TokenProgress> progress;  // in the order in which it happened
  std::vector<DraftOutcome> drafts;     // one a sequence that had guesses in the step
};

}  // namespace llmserve
