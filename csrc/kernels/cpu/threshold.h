// Selection of a threshold without sorting: radix select over unsigned keys.
#pragma once

#include <cstdint>
#include <span>

namespace llmserve {

// Maps floats to integers of the same order; NaN is not for it.
uint32_t ordered_key(float value);
float from_ordered_key(uint32_t key);

// The largest key t for which the mass of the keys >= t reaches `target` (at least 1), or 0 if none
// does. A key's mass is 1 or, weighted, the key itself. `scratch` has room for all keys.
uint32_t count_threshold(std::span<const uint32_t> keys, uint64_t target, uint32_t* scratch);
uint32_t weight_threshold(std::span<const uint32_t> keys, uint64_t target, uint32_t* scratch);

}  // namespace llmserve
