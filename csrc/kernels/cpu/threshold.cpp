#include "kernels/cpu/threshold.h"

#include <array>
#include <bit>

namespace llmserve {
namespace {

// Three digits, 11 + 11 + 10 bits: a histogram of 16 KiB stays in the L1.
struct Digit {
  int shift;
  uint32_t mask;
};
constexpr Digit kDigits[] = {{21, 0x7ff}, {10, 0x7ff}, {0, 0x3ff}};

template <bool kIsWeighted>
uint32_t select(std::span<const uint32_t> keys, uint64_t target, uint32_t* scratch) {
  uint32_t threshold = 0;
  uint64_t mass_above = 0;
  for (const Digit& digit : kDigits) {
    std::array<uint64_t, 2048> mass{};
    for (const uint32_t key : keys)
      mass[(key >> digit.shift) & digit.mask] += kIsWeighted ? key : 1;
    uint32_t bucket = digit.mask;
    while (bucket > 0 && mass_above + mass[bucket] < target) mass_above += mass[bucket--];
    threshold |= bucket << digit.shift;
    // Only the keys of this bucket can tell more. In place is fine: writes never pass reads.
    size_t count = 0;
    for (const uint32_t key : keys)
      if (((key >> digit.shift) & digit.mask) == bucket) scratch[count++] = key;
    keys = {scratch, count};
  }
  return threshold;
}

}  // namespace

uint32_t ordered_key(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

float from_ordered_key(uint32_t key) {
  return std::bit_cast<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

uint32_t count_threshold(std::span<const uint32_t> keys, uint64_t target, uint32_t* scratch) {
  return select<false>(keys, target, scratch);
}

uint32_t weight_threshold(std::span<const uint32_t> keys, uint64_t target, uint32_t* scratch) {
  return select<true>(keys, target, scratch);
}

}  // namespace llmserve
