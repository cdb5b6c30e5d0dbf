// All kernels by AVX2, FMA and F16C.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::avx2 {
namespace {

#include "kernels/cpu/avx2.inc"

// 8 sums, 2 weight vectors with their magnitudes, and 4 for a broadcast, ones and products.
constexpr int kQuantizedRows = 4;
// 13 rows take 0.85 to 0.89 of the time so, 512 rows 0.74 to 0.83 (a Zen 4).
constexpr int64_t kWidenedTiles = 4;
// Several rows of 4 bits go by one vector at a time: beside their sums in 32 bits, those in 16 bits
// would not fit the registers.
constexpr int quantized_vecs(int rows, bool is_4_bit, bool) { return is_4_bit && rows > 1 ? 1 : 2; }
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
inline IVec dot_unsigned(IVec sum, Quads w, Quads x) {
  return sum + (IVec)_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
}
struct NibbleSums {
  IVec sums;
  Quads pairs;
};
constexpr int64_t kFoldDepth = 32;  // 8 times 2 * 15 * 127 fits 16 bits
inline NibbleSums unfolded(IVec sum) { return {sum, Quads{}}; }
inline NibbleSums dot_nibbles(NibbleSums x, Quads w, Quads y) {
  return {x.sums, _mm256_add_epi16(x.pairs, _mm256_maddubs_epi16(w, y))};
}
inline IVec folded(NibbleSums x) {
  return x.sums + (IVec)_mm256_madd_epi16(x.pairs, _mm256_set1_epi16(1));
}

// 32 codes of fp8 (e4m3) as bf16, whose halves are looked up by nibbles: sign and exponent / 2, the
// bias added, and below them the other four bits. Of magnitudes without an exponent, below 8,
// tables say which of these bits differ; other indices have a bit 7, which reads a zero.
struct WidenedBytes {
  __m256i low, high;
};
inline WidenedBytes widen_bytes(__m256i codes) {
  const auto table = [](__m128i x) { return _mm256_broadcastsi128_si256(x); };
  const __m256i high_of_normals = table(_mm_setr_epi8(
      0x3c, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43, -68, -67, -66, -65, -64, -63, -62, -61));
  const __m256i high_changes =
      table(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0x3c, 7, 7, 7, 0, 0, 0, 0));
  const __m256i low_changes = table(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, (char)0xa0,
                                                  (char)0xf0, 0x40, 0x70, 0x20, 0x10));
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
  const __m256i lower = _mm256_and_si256(_mm256_slli_epi16(codes, 4), _mm256_set1_epi8(-16));
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
  const __m256i subnormal = _mm256_add_epi8(magnitude, _mm256_set1_epi8(0x78));
  return {_mm256_xor_si256(lower, _mm256_shuffle_epi8(low_changes, subnormal)),
          _mm256_xor_si256(_mm256_shuffle_epi8(high_of_normals, upper),
                           _mm256_shuffle_epi8(high_changes, subnormal))};
}
inline void widen_quads(const uint8_t* quads, uint16_t* to) {
  for (int64_t half = 0; half < 2; ++half, quads += 32, to += 16) {
    const WidenedBytes x = widen_bytes(_mm256_loadu_si256((const __m256i*)quads));
    const __m256 a = (__m256)_mm256_unpacklo_epi8(x.low, x.high);
    const __m256 b = (__m256)_mm256_unpackhi_epi8(x.low, x.high);
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm256_shuffle_ps(a, b, 0x88));
    _mm256_storeu_si256((__m256i*)(to + 32), (__m256i)_mm256_shuffle_ps(a, b, 0xdd));
  }
}
// Pairs of codes in the order of QuantizedLayout, as two rows of half a panel.
#define LLMSERVE_HAS_WIDENED_CODES
struct WidenedCodes {
  __m256i first, second;
};
inline WidenedCodes join_bytes(Quads low, Quads high) {
  return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
}
inline WidenedCodes widen_codes(Quads codes) {
  const WidenedBytes x = widen_bytes(codes);
  return join_bytes(x.low, x.high);
}
inline void widen_pairs(const uint8_t* pairs, uint16_t* to) {
  for (int64_t half = 0; half < 2; ++half, pairs += 32, to += 16) {
    const WidenedBytes x = widen_bytes(_mm256_loadu_si256((const __m256i*)pairs));
    store_pairs(x.low, x.high, to);
  }
}
inline void widen_line(const uint8_t* line, uint16_t* to) {
  for (int64_t half = 0; half < 2; ++half, line += 32, to += 32) {
    const WidenedBytes x = widen_bytes(_mm256_loadu_si256((const __m256i*)line));
    const __m256i a = _mm256_unpacklo_epi8(x.low, x.high);
    const __m256i b = _mm256_unpackhi_epi8(x.low, x.high);
    _mm256_storeu_si256((__m256i*)to, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i*)(to + 16), _mm256_permute2x128_si256(a, b, 0x31));
  }
}

#include "kernels/cpu/kernels.inc"

}  // namespace

constexpr KernelTable kTable = kKernels;

}  // namespace llmserve::cpu::avx2
