// The flat, ragged batch of one step: prefill chunks and decodes side by side, no padding.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/ops.h"

namespace llmserve {

// Where the layers of one cache group find the step's tokens.
struct KvGroupInput {
  std::span<const int64_t> slots;  // [T] where the token's key and value go: block * P + offset
  std::span<const int32_t> block_tables;  // [B, M] row-major; anything before the group's window
};

// Spans over buffers of the engine, valid for the step. Sequence b owns the tokens
// [query_starts[b], query_starts[b + 1]) at consecutive positions that end at kv_lens[b] - 1.
struct ModelInput {
  std::span<const int32_t> token_ids;           // [T], each in [0, V)
  std::span<const GivenRows> given_embeddings;  // in the place of some tokens' own
  std::span<const int32_t> positions;           // [T]
  std::span<const int32_t> query_starts;        // [B + 1], from 0 to T, increasing
  std::span<const int32_t> kv_lens;  // [B] tokens in the cache once the step's are stored
  int64_t max_blocks = 0;            // M
  std::span<const KvGroupInput> kv_groups;
  std::span<const int32_t> adapters;  // [B] whose weights are added to the model's; -1: none
  std::span<const int32_t>
      state_slots;                      // [B] where the sequence's state of fixed size is; -1: none
  std::span<const int32_t> logit_rows;  // [S] tokens in [0, T) whose logits are wanted
  // [L] layers whose hidden states are wanted as they come in, before any norm, in increasing
  // order; the number of layers stands for what leaves the last one. Of the tokens [W] in [0, T).
  std::span<const int32_t> wanted_layers;
  std::span<const int32_t> wanted_tokens;

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_sequences() const { return static_cast<int64_t>(kv_lens.size()); }
};

}  // namespace llmserve
