// Counters of one engine since its start. Prompt tokens add up, once all prompts have run: those of
// the requests admitted = prefix cache hits + run through the model - run again.
#pragma once

#include <array>
#include <cstdint>

#include "api/speculation_config.h"
#include "core/hand_over_cause.h"

namespace llmserve {

struct EngineMetrics {
  // Requests. Running and waiting count sequences: a request has n of them once its prompt has run.
  int64_t num_requests_running = 0;
  int64_t num_requests_waiting = 0;  // new, or preempted and to be recomputed
  int64_t num_requests_finished = 0;
  int64_t num_requests_aborted = 0;  // of the finished ones
  int64_t num_preemptions = 0;
  // Steps that ended with the failure of one of several ranks, and were computed again
  int64_t num_rank_failures = 0;
  // Of exchanges among GPUs, each once for all ranks
  int64_t num_nccl_errors = 0;
  // Sequences that may run at once: max_num_seqs, and fewer for a while after a step that failed
  int64_t num_seats = 0;
  // Of the last load of the weights: bringing in what the file holds and looking through it, and
  // laying out linear layers, which rounds those that become integers and, of blocks in a file,
  // reads them, too. What is packed later is in neither.
  int64_t weight_read_us = 0;
  int64_t weight_pack_us = 0;
  // Steps, by kind: a step with any prompt token counts as prefill
  int64_t num_prefill_steps = 0;
  int64_t num_decode_steps = 0;
  int64_t prefill_us = 0;
  int64_t decode_us = 0;
  // Of these steps, those that began while another one was in flight
  int64_t num_overlapped_steps = 0;
  // Decode steps on a device that are one launch: shapes of them recorded as graphs, and how often
  // those ran
  int64_t num_graph_captures = 0;
  int64_t num_graph_replays = 0;
  // Tokens
  int64_t num_prompt_tokens = 0;   // of the requests admitted
  int64_t num_prefill_tokens = 0;  // run through the model, recomputation included
  // Of those: run again after a preemption, with what was generated before it
  int64_t num_recomputed_tokens = 0;
  int64_t num_generation_tokens = 0;
  // Speculation: sequences' steps that had guesses, those guesses, and how many were accepted, in
  // all and by their place behind the newest token; and the time that guessing took
  int64_t num_drafts = 0;
  int64_t num_draft_tokens = 0;
  int64_t num_accepted_tokens = 0;
  std::array<int64_t, kMaxDraftTokens> num_accepted_per_pos{};
  int64_t draft_us = 0;
  // Lines of streams that the engine's thread wrote to sockets, and the processor time that took
  int64_t num_lines = 0;
  int64_t line_us = 0;
  // Hand-over: blocks kept for others to fetch; sequences that were fetched, and that nobody came
  // for; sequences that came from others, and that did not, so that they were computed here, by
  // cause; what that moved, and how long it took from its begin to its end
  int64_t num_leased_blocks = 0;
  int64_t num_hand_overs_sent = 0;
  int64_t num_hand_overs_lapsed = 0;
  int64_t num_hand_overs_received = 0;
  std::array<int64_t, kNumHandOverCauses> num_hand_overs_failed{};
  int64_t hand_over_sent_bytes = 0;
  int64_t hand_over_received_bytes = 0;
  int64_t hand_over_receive_us = 0;
  // Prefix cache, in tokens: queries = hits + misses
  int64_t prefix_cache_queries = 0;
  int64_t prefix_cache_hits = 0;
  int64_t prefix_cache_evictions = 0;  // blocks
  // KV pool, in blocks: free + cached + used = total
  int64_t num_blocks_total = 0;
  int64_t num_blocks_free = 0;
  int64_t num_blocks_cached = 0;
  int64_t num_blocks_used = 0;
};

}  // namespace llmserve
