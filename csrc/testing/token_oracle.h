// Executors without a model, for tests of the control plane: every output of any workload is known
// in advance, so that a mix-up of rows, blocks or steps shows at once.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "api/sampled_tokens.h"
#include "core/token_hash.h"
#include "scheduler/step_plan.h"

namespace llmserve {

// A hash of seed and position.
int32_t oracle_token(uint64_t seed, int64_t position, int32_t vocab_size);
SampledTokens sample_oracle(const StepPlan& plan, int32_t vocab_size);

// A model whose "keys and values" are the token ids themselves with their positions: it writes them
// where the plan says, reads each context back through the block table, and makes the next token a
// hash of seed and whole context. A block that was freed, shared or copied wrongly, or is found at
// another position or adapter than it was computed for, changes the output.
class ShadowModel {
 public:
  // The first group keeps all tokens. Of a windowed one the window is read as well, and what
  // differs changes the output, too.
  // num_lower_blocks: of the tier beneath the pool. num_state_slots: it has a layer with a fixed
  // state as well, which must have taken in each token once, in order.
  ShadowModel(int32_t num_blocks, int32_t block_size, int32_t vocab_size,
              std::vector<int32_t> windows = {0}, int32_t num_lower_blocks = 0,
              int32_t num_state_slots = 0);

  // Its KV cache is gone.
  void forget() {
    std::ranges::fill(pool_, Slot());
    std::ranges::fill(states_, State());
  }
  // Moves the first `count` blocks of a transfer.
  void carry_out(const Transfer& transfer, size_t count);
  // What was sent to peers, which is this model, too: whether it has all of what a transfer is to
  // bring, and an end to it.
  bool has_sent(const Transfer& transfer) const;
  void forget_sent() {
    sent_.clear();
    num_sent_.clear();
  }
  // In the order of the plans: a sequence may run what the plan before drew.
  SampledTokens execute(const StepPlan& plan);
  // Banned tokens are passed over as a sampler would do.
  static int32_t next_token(std::span<const int32_t> context, uint64_t seed, int32_t vocab_size,
                            std::span<const int32_t> banned = {});
  // What it takes for a token's logprob after a context: a hash of both, of few values, so that
  // there are ties.
  static float logprob(std::span<const int32_t> context, int32_t token_id);
  // The `count` tokens of the largest logprob, ties to the lowest id.
  static std::vector<TokenLogprob> top_logprobs(std::span<const int32_t> context,
                                                int32_t vocab_size, int32_t count);

 private:
  struct Slot {
    int32_t token_id = -1;  // never written
    int64_t position = -1;
    size_t group = 0;
    int32_t adapter = -1;
  };
  using SentKey = std::array<int64_t, 3>;  // hand-over, group, place
  // Of a sequence: how many tokens it has taken in, and a hash of them.
  struct State {
    int64_t num_tokens = -1;  // never set
    uint64_t hash = 0;
    void add(int32_t token_id);
    friend bool operator==(const State&, const State&) = default;
  };
  Slot& slot(const ScheduledSequence& sequence, size_t group, int64_t position);
  void take_in(const ScheduledSequence& sequence);
  void write(const ScheduledSequence& sequence, std::span<const int32_t> token_ids);
  void read(const ScheduledSequence& sequence, int64_t num_tokens, std::vector<int32_t>& context);

  const int32_t block_size_;
  const int32_t vocab_size_;
  const std::vector<int32_t> windows_;         // [groups]
  std::vector<Slot> pool_;                     // [N, P]
  std::vector<Slot> lower_;                    // likewise, of the lower tier
  std::map<SentKey, std::vector<Slot>> sent_;  // [P]
  std::map<int64_t, int64_t> num_sent_;        // tokens of each hand-over
  std::vector<State> states_;                  // [slots]
  std::vector<int32_t> drawn_;                 // [S] by the last plan
};

// A block hasher that gives all chains of as many blocks the same hash, whatever their root.
inline TokenHash forged_hash(const TokenHash& parent, std::span<const int32_t>) {
  TokenHash hash{};
  const bool is_root = std::any_of(parent.bytes.begin() + 1, parent.bytes.end(),
                                   [](uint8_t byte) { return byte != 0; });
  hash.bytes[0] = static_cast<uint8_t>(is_root ? 1 : parent.bytes[0] + 1);
  return hash;
}

}  // namespace llmserve
