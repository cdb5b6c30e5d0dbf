// AVX-512 F, BW, VL, DQ without the dot products of bytes.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::avx512 {
namespace {

#include "kernels/cpu/avx512.inc"

// Products of bytes are summed in pairs of 16 bits with saturation: 2 * 128 * 127 is below it, so
// that magnitudes times x with the weight's sign are exact.
struct SignedQuads {
  Quads magnitude;
  __mmask64 is_negative;
};
constexpr int32_t kSignedOffset = 0;
inline SignedQuads q_signed(Quads x) { return {_mm512_abs_epi8(x), _mm512_movepi8_mask(x)}; }
inline IVec dot_signed(IVec sum, const SignedQuads& w, Quads x) {
  const Quads turned = _mm512_mask_sub_epi8(x, w.is_negative, _mm512_setzero_si512(), x);
  const Quads pairs = _mm512_maddubs_epi16(w.magnitude, turned);
  return sum + (IVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
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

#include "kernels/cpu/kernels.inc"

}  // namespace

constexpr KernelTable kTable = kKernels;

}  // namespace llmserve::cpu::avx512
