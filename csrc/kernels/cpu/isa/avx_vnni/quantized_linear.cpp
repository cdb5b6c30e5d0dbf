// Linear layers over integers by AVX-VNNI: dot products of unsigned bytes with signed ones.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::avx_vnni {
namespace {

#include "kernels/cpu/avx2.inc"

// 12 sums keep two units of dot products busy, over a latency of 4 or 5 cycles. Beside their
// totals, where there are groups, they do not fit 16 registers; 4 rows, which do, take 1.1 to 1.2
// times as long, 6 by one vector 1.4 times (a Zen 4, by the same products of AVX-512).
constexpr int kQuantizedRows = 6;
constexpr int quantized_vecs(int, bool, bool) { return 2; }

// Signed bytes plus 128 are unsigned.
struct SignedQuads {
  Quads shifted;
};
constexpr int32_t kSignedOffset = 128;
inline SignedQuads q_signed(Quads x) { return {_mm256_xor_si256(x, _mm256_set1_epi8((char)0x80))}; }
inline IVec dot_signed(IVec sum, const SignedQuads& w, Quads x) {
  return (IVec)_mm256_dpbusd_avx_epi32((__m256i)sum, w.shifted, x);
}
typedef __m256i NibbleSums;
constexpr int64_t kFoldDepth = 0;  // the sums have 32 bits
inline NibbleSums unfolded(IVec sum) { return (__m256i)sum; }
inline NibbleSums dot_nibbles(NibbleSums sums, Quads w, Quads x) {
  return _mm256_dpbusd_avx_epi32(sums, w, x);
}
inline IVec folded(NibbleSums sums) { return (IVec)sums; }

#include "kernels/cpu/matmul.inc"
#include "kernels/cpu/quantized.inc"

}  // namespace

void quantized_linear(const QuantizedPart* part) { run_quantized(part); }

}  // namespace llmserve::cpu::avx_vnni
