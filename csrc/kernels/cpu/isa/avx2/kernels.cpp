// AVX2, FMA and F16C: 8 lanes, 16 registers.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::avx2 {
namespace {

constexpr int kLanes = 8;
// 12 sums, 2 weight vectors, a broadcast and a mask: 6 rows x 16 columns keep both FMA units busy
// (12 chains over a latency of 4 to 5 cycles).
constexpr int kRegisters = 16;
constexpr int kRowTile = 6;
#include "kernels/cpu/lanes.inc"
#include "kernels/cpu/x86.inc"

inline Vec v_fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec v_max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec v_min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline bool v_any_greater(Vec a, Vec b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
}
// The products of the even lanes, and of the odd ones, then their halves side by side.
inline void u_mul_wide(UVec a, uint32_t b, UVec* high, UVec* low) {
  const __m256i factor = _mm256_set1_epi32((int)b);
  const __m256i even = _mm256_mul_epu32((__m256i)a, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
  *high = (UVec)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  *low = a * u_splat(b);
}

inline Vec v_load(const uint16_t* p) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return (Vec)_mm256_slli_epi32(words, 16);
}
inline float v_sum(Vec x) { return fold_sum(x); }
inline float v_largest(Vec x) { return fold_max(x); }

#include "kernels/cpu/kernels.inc"

}  // namespace

constexpr KernelTable kTable = kKernels;

}  // namespace llmserve::cpu::avx2
