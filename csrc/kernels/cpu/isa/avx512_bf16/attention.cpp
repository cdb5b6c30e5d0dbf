// Attention over caches in bf16 and fp8 by AVX-512 BF16: dot products of pairs, queries and
// probabilities rounded to bf16 first.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::avx512_bf16 {
namespace {

#include "kernels/cpu/avx512.inc"

#include "core/math/exp.inc"
#include "kernels/cpu/bf16.inc"
#include "kernels/cpu/matmul.inc"

#include "kernels/cpu/attention_tile.inc"

#include "kernels/cpu/fp8_vbmi.inc"

#include "kernels/cpu/attention_codes.inc"

#include "kernels/cpu/attention_bf16.inc"

#include "kernels/cpu/attention_fp8.inc"

#include "kernels/cpu/attention.inc"

#include "kernels/cpu/latent_attention.inc"

}  // namespace

void attention_bf16(const AttentionCall* call, const AttentionItem* item, const AttentionItem* next,
                    float* scratch) {
  attention<uint16_t, uint16_t>(call, item, next, scratch);
}
void attention_fp8(const AttentionCall* call, const AttentionItem* item, const AttentionItem* next,
                   float* scratch) {
  attention<uint16_t, uint8_t>(call, item, next, scratch);
}
void merge_attention_rounded(const AttentionCall* call, const AttentionItem* item,
                             int64_t num_spans, float* scratch) {
  merge_attention<uint16_t>(call, item, num_spans, scratch);
}

}  // namespace llmserve::cpu::avx512_bf16
