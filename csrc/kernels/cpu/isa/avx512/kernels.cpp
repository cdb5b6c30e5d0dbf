// AVX-512 F, BW, VL, DQ: 16 lanes, 32 registers.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::avx512 {
namespace {

constexpr int kLanes = 16;
// 24 sums (6 rows x 64 columns), 4 weight vectors, a broadcast and a mask.
constexpr int kRegisters = 32;
constexpr int kRowTile = 6;
#include "kernels/cpu/lanes.inc"
#include "kernels/cpu/x86.inc"

inline Vec v_fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec v_max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec v_min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline bool v_any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
// The products of the even lanes, and of the odd ones, then their halves side by side.
inline void u_mul_wide(UVec a, uint32_t b, UVec* high, UVec* low) {
  const __m512i factor = _mm512_set1_epi32((int)b);
  const __m512i even = _mm512_mul_epu32((__m512i)a, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
  *high = (UVec)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  *low = a * u_splat(b);
}

inline Vec v_load(const uint16_t* p) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (Vec)_mm512_slli_epi32(words, 16);
}
inline __m256 low(Vec x) { return _mm512_castps512_ps256(x); }
inline __m256 high(Vec x) { return _mm512_extractf32x8_ps(x, 1); }
inline float v_sum(Vec x) { return fold_sum(_mm256_add_ps(low(x), high(x))); }
inline float v_largest(Vec x) { return fold_max(_mm256_max_ps(low(x), high(x))); }

#include "kernels/cpu/kernels.inc"

}  // namespace

constexpr KernelTable kTable = kKernels;

}  // namespace llmserve::cpu::avx512
