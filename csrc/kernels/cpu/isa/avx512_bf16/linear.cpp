// Linear layers over weights in bf16 and in codes of floats by AVX-512 BF16: dot products of pairs,
// activations rounded to bf16 first.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::avx512_bf16 {
namespace {

#include "kernels/cpu/avx512.inc"
#include "kernels/cpu/bf16.inc"
#include "kernels/cpu/matmul.inc"

// sums += a [R, k] x C panels, a pair of K at a time, which is a panel's row; k is even here.
template <int R, int C, int P>
inline void multiply_panels(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t stride,
                            int64_t k, const uint16_t* ahead, int64_t ahead_step,
                            Vec (&sums)[R][C * kVecsPerPanel]) {
  for (int64_t i = 0; i < k; i += 2) {
    prefetch_panels<P>(ahead, stride);
    __m512i w[C];
    auto load = [&]<int c>()
                    __attribute__((always_inline)) { w[c] = _mm512_loadu_si512(b + c * stride); };
    unrolled<C>(load);
    auto multiply = [&]<int r>() __attribute__((always_inline)) {
      int32_t pair;
      memcpy(&pair, a + r * lda + i, sizeof(pair));
      const __m512i x = _mm512_set1_epi32(pair);
      auto add = [&]<int c>() __attribute__((always_inline)) {
        sums[r][c] = _mm512_dpbf16_ps(sums[r][c], (__m512bh)w[c], (__m512bh)x);
      };
      unrolled<C>(add);
    };
    unrolled<R>(multiply);
    b += 2 * kPanelWidth;
    ahead += 2 * ahead_step;
  }
}

#include "kernels/cpu/linear.inc"
#include "kernels/cpu/transposed_linear.inc"

#include "kernels/cpu/fp8_vbmi.inc"
#include "kernels/cpu/group_scales.inc"

// Pairs multiply as they are.
#define LLMSERVE_HAS_WIDENED_CODES
inline WidenedCodes join_bytes(Quads low, Quads high) {
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}
inline WidenedCodes factors_of(WidenedCodes w, const uint16_t*) { return w; }
inline Vec add_products(Vec sum, const WidenedCodes& w, const uint16_t* x) {
  int32_t pairs[2];
  memcpy(pairs, x, sizeof(pairs));
  sum = _mm512_dpbf16_ps(sum, (__m512bh)w.first, (__m512bh)_mm512_set1_epi32(pairs[0]));
  return _mm512_dpbf16_ps(sum, (__m512bh)w.second, (__m512bh)_mm512_set1_epi32(pairs[1]));
}

#include "kernels/cpu/coded_linear.inc"

}  // namespace

void coded_linear(const QuantizedPart* part) { run_coded_linear<uint16_t>(part); }

constexpr LinearKernel kLinear = {
    round_row,    linear_scratch_floats<uint16_t>,       linear<uint16_t, uint16_t>,
    piece_panels, transposed_linear<uint16_t, uint16_t>, kTransposedAtLeast};

}  // namespace llmserve::cpu::avx512_bf16
