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
constexpr int64_t kWidenedTiles = 11;  // as AVX-512 VNNI: not measured
constexpr int quantized_vecs(int, bool, bool) { return 2; }

inline Quads q_dot(Quads sum, Quads w, Quads x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }

#include "kernels/cpu/vnni.inc"

#include "kernels/cpu/matmul.inc"
#include "kernels/cpu/quantized.inc"

}  // namespace

void quantized_linear(const QuantizedPart* part) { run_quantized(part); }

}  // namespace llmserve::cpu::avx_vnni
