// Random operations on the real scheduler, a million at a time: what tests/unit does in Python with
// operations that shrink, without Python between them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmserve {

struct SoakConfig {
  std::string policy = "fcfs";
  int32_t num_blocks = 9;
  int32_t block_size = 2;
  int32_t max_num_seqs = 3;
  int32_t max_num_batched_tokens = 5;
  bool enable_prefix_caching = true;
  bool forge_collisions = false;
  std::vector<int32_t> windows{0};  // of the cache groups; the first one keeps all tokens
  int32_t max_in_flight = 1;
  bool runs_ahead = true;
  int32_t num_lower_blocks = 0;
  int32_t num_state_slots = 0;
  int32_t percent_drafted = 0;  // of the requests: their next tokens are guessed
  // Of the requests: their blocks go to a peer, which is the scheduler itself, and another request
  // goes on with them.
  int32_t percent_handed_over = 0;
  int32_t percent_late_masks = 0;  // of rows whose token nothing runs ahead of
  uint64_t seed = 0;
};

// What happened, so that a test can tell that everything did.
struct SoakCounts {
  int64_t num_operations = 0;
  int64_t num_steps = 0;
  int64_t num_requests = 0;
  int64_t num_refused = 0;  // larger than the pool
  int64_t num_forked = 0;   // samples beyond a request's first
  int64_t num_copied = 0;   // blocks, on write
  int64_t num_preemptions = 0;
  int64_t num_hits = 0;  // tokens
  int64_t num_evictions = 0;
  int64_t num_awaited = 0;  // tokens that ran before they were committed
  int64_t num_dropped = 0;  // of those, whose sequence ended with the step before
  int64_t num_drafted = 0;  // tokens that ran as guesses
  int64_t num_accepted = 0;
  int64_t num_late_masks = 0;
  int64_t num_adapted = 0;    // requests that named an adapter
  int64_t num_resumed = 0;    // requests that came with generated tokens
  int64_t num_stores = 0;     // transfers to the lower tier that came to their end
  int64_t num_loads = 0;      // from it
  int64_t num_sends = 0;      // to a peer
  int64_t num_receives = 0;   // from it
  int64_t num_broken = 0;     // transfers that did not come to their end
  int64_t num_snapshots = 0;  // of fixed states, copied
  int64_t num_restarts = 0;   // of the KV cache, since a rank was lost
  int64_t num_stopped = 0;    // samples, by how they ended
  int64_t num_full = 0;
  int64_t num_aborted = 0;
  int64_t num_failed = 0;
  int64_t longest_stall = 0;  // steps in a row without whoever is first in the order of service
  std::vector<std::pair<std::string, int64_t>> transitions;  // of sequences, by state and event
};

// With two steps in flight each is carried out as it is scheduled, and committed after the next one
// was. Adds, steps, aborts, preempts, resets and fails at random, in a step and between steps.
// After each operation: free + cached + referenced = total, every reference has its holder, every
// token is the one that its prompt and seed give, guessed or not, every sequence ends as it must,
// and whoever is served first has not been passed over for longer than all the others can take. No
// block that a step in flight looks at is given to anybody else. Every 500 operations everything
// ends, and every block comes back. Throws InternalError with the operation's number, which
// together with the config repeats it.
SoakCounts soak_scheduler(const SoakConfig& config, int64_t num_operations);

}  // namespace llmserve
