// AVX-512 F, BW, VL, DQ without the dot products of bytes.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::avx512 {
namespace {

#include "kernels/cpu/avx512.inc"

// 512 rows take 0.69 to 0.77 of the time so (a Zen 4).
constexpr int64_t kWidenedTiles = 4;
// Products of bytes are summed in pairs of 16 bits with saturation: 2 * 128 * 127 is below it, so
// that magnitudes times x with the weight's sign are exact.
struct SignedQuads {
  Quads magnitude;
  __mmask64 is_negative;
};
constexpr int32_t kSignedOffset = 0;
inline SignedQuads q_signed(Quads x) { return {_mm512_abs_epi8(x), _mm512_movepi8_mask(x)}; }
inline IVec dot_signed(IVec sum, const SignedQuads& w, Quads x) {
  const Quads signed_x = _mm512_mask_sub_epi8(x, w.is_negative, _mm512_setzero_si512(), x);
  const Quads pairs = _mm512_maddubs_epi16(w.magnitude, signed_x);
  return sum + (IVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
inline IVec dot_unsigned(IVec sum, Quads w, Quads x) {
  return sum + (IVec)_mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1));
}
struct NibbleSums {
  IVec sums;
  Quads pairs;
};
constexpr int64_t kFoldDepth = 32;  // 8 times 2 * 15 * 127 fits 16 bits
inline NibbleSums unfolded(IVec sum) { return {sum, Quads{}}; }
inline NibbleSums dot_nibbles(NibbleSums x, Quads w, Quads y) {
  return {x.sums, _mm512_add_epi16(x.pairs, _mm512_maddubs_epi16(w, y))};
}
inline IVec folded(NibbleSums x) {
  return x.sums + (IVec)_mm512_madd_epi16(x.pairs, _mm512_set1_epi16(1));
}

// 32 codes of fp8 (e4m3) in the low bytes of `codes`, as bf16. Of `moved`, bit 15 is the sign and
// bits 4 to 10 are the magnitude, whatever the others hold. What is added makes up for the
// exponent's bias; of magnitudes without an exponent, below 8, a table has what leads to the bits
// of their numbers.
inline __m512i widen_codes(__m512i codes, __m512i moved) {
  const __m512i bias = _mm512_set1_epi16(120 << 7);
  const __m512i of_subnormals = _mm512_zextsi128_si512(
      _mm_setr_epi16(0, 0x3af0, 0x3b60, 0x3b90, 0x3bc0, 0x3bd0, 0x3be0, 0x3bf0));
  const __mmask32 is_subnormal = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
  const __m512i added = _mm512_mask_permutexvar_epi16(bias, is_subnormal, codes, of_subnormals);
  return _mm512_add_epi16(_mm512_and_si512(moved, _mm512_set1_epi16((int16_t)0x87f0)), added);
}
inline void widen_quads(const uint8_t* quads, uint16_t* to) {
  const __m512i first =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13));
  const __m512i second = _mm512_add_epi8(first, _mm512_set1_epi8(2));
  // Each code twice in a word.
  const __m512i a = _mm512_shuffle_epi8(_mm512_loadu_si512(quads), first);
  const __m512i b = _mm512_shuffle_epi8(_mm512_loadu_si512(quads), second);
  _mm512_storeu_si512(to, widen_codes(a, _mm512_srai_epi16(a, 4)));
  _mm512_storeu_si512(to + 32, widen_codes(b, _mm512_srai_epi16(b, 4)));
}
// Pairs of codes in the order of QuantizedLayout, as two rows of a panel.
#define LLMSERVE_HAS_WIDENED_CODES
struct WidenedCodes {
  __m512i first, second;
};
inline WidenedCodes join_bytes(Quads low, Quads high) {
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}
inline WidenedCodes widen_codes(Quads codes) {
  const WidenedCodes twice = join_bytes(codes, codes);  // each code twice in a word
  return {widen_codes(twice.first, _mm512_srai_epi16(twice.first, 4)),
          widen_codes(twice.second, _mm512_srai_epi16(twice.second, 4))};
}
inline void widen_pairs(const uint8_t* pairs, uint16_t* to) {
  const WidenedCodes x = widen_codes(_mm512_loadu_si512(pairs));
  _mm512_storeu_si512(to, x.first);
  _mm512_storeu_si512(to + 32, x.second);
}
inline void widen_line(const uint8_t* line, uint16_t* to) {
  const __m512i a = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)line));
  const __m512i b = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(line + 32)));
  _mm512_storeu_si512(to, widen_codes(a, _mm512_slli_epi16(a, 4)));
  _mm512_storeu_si512(to + 32, widen_codes(b, _mm512_slli_epi16(b, 4)));
}

#include "kernels/cpu/kernels.inc"

}  // namespace

constexpr KernelTable kTable = kKernels;

}  // namespace llmserve::cpu::avx512
