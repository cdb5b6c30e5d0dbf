// Host conversions between f32 and narrower floats, bit-exact and round-to-nearest-even.
// Not for kernels/cpu/isa: files compiled with an instruction set of their own include no inline
// functions.
#pragma once

#include <bit>
#include <cstdint>

namespace llmserve {

inline float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// NaN stays NaN (quiet); everything else rounds to nearest, ties to even.
inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float f16_to_f32(uint16_t bits);
uint16_t f32_to_f16(float value);

// e4m3 (core/math/fp8.inc).
float fp8_to_f32(uint8_t code);
// A row as codes and the scale that they are to be multiplied with: v_to_fp8(x / scale), the scale
// by v_fp8_scale. A row with infinity or NaN has zeros and the scale NaN, and so is NaN.
float round_row_to_fp8(const float* x, int64_t n, uint8_t* codes);

}  // namespace llmserve
