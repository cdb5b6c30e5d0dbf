// Linear layers over integers by AVX-512 VNNI: dot products of unsigned bytes with signed ones.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::avx512_vnni {
namespace {

#include "kernels/cpu/avx512.inc"

// Signed bytes plus 128 are unsigned.
struct SignedQuads {
  Quads shifted;
};
constexpr int32_t kSignedOffset = 128;
inline SignedQuads q_signed(Quads x) { return {_mm512_xor_si512(x, _mm512_set1_epi8((char)0x80))}; }
inline IVec dot_signed(IVec sum, const SignedQuads& w, Quads x) {
  return (IVec)_mm512_dpbusd_epi32((__m512i)sum, w.shifted, x);
}
typedef __m512i NibbleSums;
constexpr int64_t kFoldDepth = 0;  // the sums have 32 bits
inline NibbleSums unfolded(IVec sum) { return (__m512i)sum; }
inline NibbleSums dot_nibbles(NibbleSums sums, Quads w, Quads x) {
  return _mm512_dpbusd_epi32(sums, w, x);
}
inline IVec folded(NibbleSums sums) { return (IVec)sums; }

#include "kernels/cpu/matmul.inc"
#include "kernels/cpu/quantized.inc"

}  // namespace

void quantized_linear(const QuantizedPart* part) { run_quantized(part); }

}  // namespace llmserve::cpu::avx512_vnni
