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
inline IVec v_widen(const uint8_t* p) {
  return (IVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
inline float v_sum(Vec x) { return fold_sum(x); }
inline float v_largest(Vec x) { return fold_max(x); }

// 8 sums, 2 weight vectors with their magnitudes, and 4 for a broadcast, ones and products.
constexpr int kQuantizedRows = 4;
// Several rows of 4 bits go by one vector at a time: beside their sums in 32 bits, those in 16 bits
// would not fit the registers.
constexpr int quantized_vecs(int rows, bool is_4_bit, bool) { return is_4_bit && rows > 1 ? 1 : 2; }
inline Vec v_load_f16(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
typedef __m256i Quads;
inline Quads q_load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Quads q_splat(const int8_t* p) {
  int32_t quad;
  memcpy(&quad, p, sizeof(quad));
  return _mm256_set1_epi32(quad);
}
inline Quads q_low(Quads x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Quads q_high(Quads x) { return q_low(_mm256_srli_epi16(x, 4)); }
// Products of bytes are summed in pairs of 16 bits with saturation: 2 * 128 * 127 is below it, so
// that magnitudes times x with the weight's sign are exact.
struct SignedQuads {
  Quads value;
  Quads magnitude;
};
constexpr int32_t kSignedOffset = 0;
inline SignedQuads q_signed(Quads x) { return {x, _mm256_abs_epi8(x)}; }
inline IVec dot_signed(IVec sum, const SignedQuads& w, Quads x) {
  const Quads pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(x, w.value));
  return sum + (IVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
struct NibbleSums {
  IVec sums;
  Quads pairs;
};
constexpr int64_t kFoldDepth = 32;  // 8 times 2 * 15 * 127 fits 16 bits
constexpr int kDotChains = 1;       // sums wait for additions alone
inline NibbleSums unfolded(IVec sum) { return {sum, Quads{}}; }
inline NibbleSums dot_nibbles(NibbleSums x, Quads w, Quads y) {
  return {x.sums, _mm256_add_epi16(x.pairs, _mm256_maddubs_epi16(w, y))};
}
inline IVec folded(NibbleSums x) {
  return x.sums + (IVec)_mm256_madd_epi16(x.pairs, _mm256_set1_epi16(1));
}

#include "kernels/cpu/fp8_lanes.inc"

#include "kernels/cpu/kernels.inc"

}  // namespace

constexpr KernelTable kTable = kKernels;

}  // namespace llmserve::cpu::avx2
