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

// Half precision as f32: exact. Its exponent and mantissa go up by 13 bits; what is left is the
// difference of the two biases, which one exact multiplication by 2^112 makes up for, subnormals
// included.
inline float f16_to_f32(uint16_t bits) {
  const uint32_t magnitude = (bits & 0x7fffu) << 13;
  // Infinity and NaN: the exponent goes to all ones.
  const uint32_t wide = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : magnitude;
  const float scale = magnitude >= 0x0f800000u ? 1.0f : 0x1p112f;
  const float value = std::bit_cast<float>(wide) * scale;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | (bits & 0x8000u) << 16);
}

// NaN stays NaN (quiet), 65520 and more are infinite; everything else rounds to nearest, ties to
// even. Written without branches, which compilers make vectors of.
inline uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  // Below 2^-14: the f32 addition rounds to a multiple of 2^-24, which is an ulp of [0.5, 1).
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) |
                               (magnitude < 0x477ff000u ? finite : special));
}

// e4m3 (core/math/fp8.inc).
float fp8_to_f32(uint8_t code);
// The nearest, ties to even; 448 for what is larger. NaN stays NaN.
uint8_t f32_to_fp8(float value);
// A row as codes and the scale that they are to be multiplied with: v_to_fp8(x / scale), the scale
// by v_fp8_scale. A row with infinity or NaN has zeros and the scale NaN, and so is NaN.
float round_row_to_fp8(const float* x, int64_t n, uint8_t* codes);

}  // namespace llmserve
