// What sets a group of layers apart in the KV cache. The layers of a group share a block table, and
// a block holds a group's keys and values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace llmserve {

struct CacheGroupSpec {
  int32_t window = 0;  // tokens that its layers look back; 0: all

  bool keeps_all() const { return window == 0; }
  friend bool operator==(const CacheGroupSpec&, const CacheGroupSpec&) = default;
};

// A group for each window.
inline std::vector<CacheGroupSpec> groups_of_windows(std::span<const int32_t> windows) {
  std::vector<CacheGroupSpec> groups;
  for (const int32_t window : windows) groups.push_back({.window = window});
  return groups;
}

}  // namespace llmserve
