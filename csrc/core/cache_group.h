// What the layers of one cache group keep of a sequence: what a model says of its layers, the
// scheduler of its block tables and slots, and the memory plan of both.
//
// Layers that look back equally far and keep rows of the same widths share a group, and so a block
// table: a block holds the rows of all of them. All blocks of a pool are of one size, so that all
// groups of rows keep rows of the same widths. A group of states has a slot a sequence instead.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace llmserve {

struct CacheGroupSpec {
  // Of rows: tokens that its layers look back; 0: all.
  int32_t window = 0;
  int32_t num_layers = 1;
  // What each layer keeps of a token: a row of keys and one of values a KV head.
  int64_t num_kv_heads = 0;  // K
  int64_t key_dim = 0;       // D
  int64_t value_dim = 0;     // Dv
  // The value is the first Dv elements of the key's row, which is kept alone: what multi-head
  // latent attention keeps. DeepSeek-AI 2024, section 2.1.
  bool values_in_keys = false;
  // More than 0: a group of states. Each layer keeps so many bytes of a sequence, and no rows. A
  // state cannot be cut back to fewer tokens: prefixes are found by snapshots of it.
  int64_t state_bytes = 0;

  bool is_state() const { return state_bytes > 0; }
  bool keeps_all() const { return window == 0; }
  // Of a token, in one layer.
  int64_t num_rows() const { return num_kv_heads * (values_in_keys ? 1 : 2); }
  int64_t num_elements() const {
    return num_kv_heads * (key_dim + (values_in_keys ? 0 : value_dim));
  }
  bool has_rows_of(const CacheGroupSpec& other) const {
    return num_kv_heads == other.num_kv_heads && key_dim == other.key_dim &&
           value_dim == other.value_dim && values_in_keys == other.values_in_keys;
  }
  friend bool operator==(const CacheGroupSpec&, const CacheGroupSpec&) = default;
};

// The groups of rows, which come first: those of block tables.
inline std::span<const CacheGroupSpec> row_groups(std::span<const CacheGroupSpec> groups) {
  const auto first_state = std::ranges::find_if(groups, &CacheGroupSpec::is_state);
  return groups.first(static_cast<size_t>(first_state - groups.begin()));
}

// Layers that a block has room for: those of the group with the most.
inline int32_t num_lanes(std::span<const CacheGroupSpec> groups) {
  int32_t count = 0;
  for (const CacheGroupSpec& group : row_groups(groups)) count = std::max(count, group.num_layers);
  return count;
}

// Bytes of a slot: the states of all layers that have one.
inline int64_t state_bytes(std::span<const CacheGroupSpec> groups) {
  int64_t bytes = 0;
  for (const CacheGroupSpec& group : groups) bytes += group.num_layers * group.state_bytes;
  return bytes;
}

}  // namespace llmserve
