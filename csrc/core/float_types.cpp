#include "core/float_types.h"

#include <algorithm>
#include <cmath>

namespace llmserve {
namespace {

#include "core/math/scalar_lanes.inc"
// Written in terms of the lanes.
#include "core/math/fp8.inc"

}  // namespace

float fp8_to_f32(uint8_t code) { return v_from_fp8(code); }
uint8_t f32_to_fp8(float value) { return static_cast<uint8_t>(v_to_fp8(value)); }

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
