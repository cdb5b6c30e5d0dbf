#include "core/float_types.h"

#include <algorithm>
#include <cmath>

namespace llmserve {
namespace {

#include "core/math/scalar_lanes.inc"
// Written in terms of the lanes.
#include "core/math/fp8.inc"

}  // namespace

float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);  // zero and subnormals
  return sign ? -magnitude : magnitude;
}

uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u)
    return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (magnitude >= 0x38800000u) {                  // normal: 2^-14 and up
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  // Subnormal: let the hardware round to a multiple of 2^-24 (the f32 addition does it, ties to
  // even).
  const float scaled = std::bit_cast<float>(magnitude) + 0.5f;  // ulp of [0.5, 1) is 2^-24
  return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(scaled) - 0x3f000000u));
}

float fp8_to_f32(uint8_t code) { return v_from_fp8(code); }

float round_row_to_fp8(const float* x, int64_t n, uint8_t* codes) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, v_bits(x[i]) & 0x7fffffff);
  const float scale = v_fp8_scale(largest);
  if (std::isnan(scale)) {
    std::fill_n(codes, n, uint8_t{0});
    return scale;
  }
  const float inverse = 1.0f / scale;  // exact: a power of two
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(v_to_fp8(x[i] * inverse));
  return scale;
}

}  // namespace llmserve
