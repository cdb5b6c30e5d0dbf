#include "kernels/ref/bf16_products.h"

#include <algorithm>
#include <cmath>

#include "core/float_types.h"

namespace llmserve {
namespace {

constexpr int64_t kTileDepth = 32;  // K of a tile of bf16

float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

float multiply_add(uint16_t a, uint16_t b, float sum) {
  return flush(std::fma(flush(bf16_to_f32(a)), flush(bf16_to_f32(b)), flush(sum)));
}

float dot_pairs(const uint16_t* a, const uint16_t* b, int64_t k) {
  float sum = 0;
  for (int64_t i = 0; i < k; i += 2) {
    if (i + 1 < k) sum = multiply_add(a[i + 1], b[i + 1], sum);
    sum = multiply_add(a[i], b[i], sum);
  }
  return sum;
}

float dot_tiles(const uint16_t* a, const uint16_t* b, int64_t k) {
  float sum = 0;
  for (int64_t begin = 0; begin < k; begin += kTileDepth) {
    float halves[2] = {};
    for (int64_t i = begin; i < std::min(begin + kTileDepth, k); ++i)
      halves[i % 2] = multiply_add(a[i], b[i], halves[i % 2]);
    sum = flush(sum + flush(halves[0] + halves[1]));
  }
  return sum;
}

}  // namespace

Bf16Products bf16_products(std::string_view isa) {
  if (isa == "amx") return Bf16Products::kTiles;
  return isa == "avx512_bf16" ? Bf16Products::kPairs : Bf16Products::kNone;
}

uint16_t round_to_bf16(float x) { return f32_to_bf16(flush(x)); }

float dot_bf16(Bf16Products how, const uint16_t* a, const uint16_t* b, int64_t k) {
  return how == Bf16Products::kPairs ? dot_pairs(a, b, k) : dot_tiles(a, b, k);
}

}  // namespace llmserve
