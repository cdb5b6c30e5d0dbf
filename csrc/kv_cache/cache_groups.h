// The arithmetic of cache groups: how many blocks of the pool a sequence holds. A group with a
// window keeps the blocks that the next token looks at, and gives back those before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace llmserve {

// The first block that the token at position num_tokens looks at; those before are not needed.
inline int64_t first_needed_block(int32_t window, int64_t num_tokens, int64_t block_size) {
  if (window == 0) return 0;
  return std::max<int64_t>(0, num_tokens - window + 1) / block_size;
}

// Blocks that a sequence holds at most at any time on its way to num_tokens tokens, of which a step
// runs up to max_step_tokens: with a window, those of a step and of what its first token sees.
inline int64_t max_blocks_held(int32_t window, int64_t num_tokens, int64_t block_size,
                               int64_t max_step_tokens) {
  const int64_t all = (num_tokens + block_size - 1) / block_size;
  if (window == 0 || max_step_tokens >= num_tokens) return all;
  // A range of tokens that begins anywhere in a block.
  const int64_t length = window - 1 + max_step_tokens;
  return std::min(all, (length + block_size - 2) / block_size + 1);
}

// In all groups together.
inline int64_t max_blocks_held(std::span<const int32_t> windows, int64_t num_tokens,
                               int64_t block_size, int64_t max_step_tokens) {
  int64_t sum = 0;
  for (const int32_t window : windows)
    sum += max_blocks_held(window, num_tokens, block_size, max_step_tokens);
  return sum;
}

}  // namespace llmserve
