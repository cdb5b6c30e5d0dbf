// Cache groups of tests: what the control plane looks at, without the widths of a model's rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/cache_group.h"

namespace llmserve {

// A group of rows for each window, and one of states where there are slots for them.
inline std::vector<CacheGroupSpec> groups_of_windows(std::span<const int32_t> windows,
                                                     int32_t num_state_slots = 0) {
  std::vector<CacheGroupSpec> groups;
  for (const int32_t window : windows) groups.push_back({.window = window});
  if (num_state_slots > 0) groups.push_back({.state_bytes = 1});
  return groups;
}

}  // namespace llmserve
