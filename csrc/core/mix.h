// Seeds from seeds. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
// 2014 (SplitMix64).
#pragma once

#include <cstdint>

namespace llmserve {

// A bijection of 64 bits whose output bits all depend on every input bit.
constexpr uint64_t mix64(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

constexpr uint64_t mix64(uint64_t first, uint64_t second) { return mix64(mix64(first) ^ second); }

// The seed of sample i of a request: sample 0 has the request's own, so that n = 1 and the first of
// n agree.
constexpr uint64_t sample_seed(uint64_t request_seed, int32_t sample_index) {
  return sample_index == 0 ? request_seed
                           : mix64(request_seed, static_cast<uint64_t>(sample_index));
}

}  // namespace llmserve
