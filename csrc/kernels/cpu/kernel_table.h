// The interface between the cpu backend and the object files of each instruction set: functions
// over raw pointers and plain structs, gathered in one table. cpu_features.cpp says which set has
// which.
//
// The files of isa/ include this header, op_numbers.h and definition-only .inc files, and nothing
// else of the project. An inline function compiled for AVX-512 could be merged into everybody's.
#pragma once

#include <stdint.h>

#include "kernels/op_numbers.h"

namespace llmserve::cpu {

// Columns of a packed weight panel: one AVX-512 vector, two of AVX2, one row of an AMX tile. A
// weight is [ceil(N / 16)] panels, and a panel is one contiguous stream: f32 [K][16], or bf16
// [ceil(K / 2)][16][2], whose odd K is padded with zero.
constexpr int64_t kPanelWidth = 16;

// The blocks of a product of many rows. linear.inc has others for rows in bf16.
constexpr int64_t kRowBlock = 96;     // 192 KiB at kDepthBlock: less than half of an L2 of 512 KiB
constexpr int64_t kDepthBlock = 512;  // 16 KiB of a bf16 panel: half of the smallest L1
constexpr int64_t kPanelBlock = 32;   // partial sums of kRowBlock rows: 192 KiB, too
// Few rows take more of K at once: a block of this many floats is half of the smallest L1.
constexpr int64_t kFewRowsFloats = 4096;
// Floats between two rows of a copied block, which keep the rows out of the same sets of the L1.
constexpr int64_t kRowPadding = 16;

// One thread's share of a product: the panels [panel_begin, panel_end) of a packed weight.
struct LinearPart {
  const void* x;     // [m, k] f32, or bf16 from LinearKernel::round_row
  int64_t x_stride;  // elements from row to row
  int64_t m, n, k;
  const void* weight;  // packed
  const float* bias;   // [n] or null
  float* out;          // [m, n]
  int64_t out_stride;
  bool accumulate;
  int64_t panel_begin, panel_end;
  float* scratch;  // LinearKernel::scratch_floats
};

// The transposed product: x is packed in panels, and the weight's rows are read as a file has them.
// One thread's share is the rows [row_begin, row_end) of the weight.
struct TransposedPart {
  const void* rows;  // [n, k], n >= kPanelWidth and an even k
  int64_t n, k;
  int64_t row_begin, row_end;
  const void* x;  // [m, k] in panels, of f32 or of what round_row makes of it
  int64_t m;
  const float* bias;  // [n] or null
  float* out;         // [m, n]
  int64_t out_stride;
  bool accumulate;
};

// The products with weights of one dtype. Each output is one sum over k in order, then + bias, then
// + the old output where LinearPart::accumulate.
struct LinearKernel {
  // Rounds a row of x [k], or some columns of it, to the bf16 that `run` takes. An odd k is
  // followed by a zero, and the caller clears the rest of k's last cache line. Null: `run` takes
  // floats.
  void (*round_row)(const float* x, int64_t k, uint16_t* to);
  int64_t (*scratch_floats)(int64_t m, int64_t k);
  void (*run)(const LinearPart* part);
  // The least number of panels that cost no more as a part of their own. Null: every part does.
  int64_t (*piece_panels)(int64_t m) = nullptr;
  // Has the bits of `run`. Null where it would not, or where its time has not been measured.
  void (*run_transposed)(const TransposedPart* part) = nullptr;
  // Rows of x for each of their panels from which run_transposed is the faster one. Below, packing
  // the weight takes no longer.
  int64_t transposed_at_least = 0;
};

// One group of a row of x, rounded to integers.
struct IntegerGroup {
  float scale;
  float scaled_sum;  // scale * float(sum)
  int32_t sum;       // of the integers
};

// The layout of a quantized weight: panels of kPanelWidth columns, each padded to whole cache
// lines. A panel holds its integers first and its scales behind them.
//
// Integers, by their bits. A quad is four consecutive K, which a dot product of bytes takes at
// once.
//   8     [ceil(K / 4)][16][4]: a byte each.
//   4     [K / 8][16][4]: a byte's low half is of one quad, its high half of the next.
//   5, 6  For each 8 or 4 quads [1][16][4] of upper bits: the first quad has a byte's lowest bits.
//         Then the lower 4 bits of all these quads, as for 4.
//   2, 3  For each 4 quads [1][16][4] of lower 2 bits: the first quad has a byte's lowest bits. For
//         3 bits, [16][2] third bits follow, 4 for each of 64 places: by place, then by quad.
// Codes of floats, of 8 and 4 bits, lie so, too, but that of the 4 quads of each 16 bytes the first
// two K come before the others, as pairs of bf16 have them.
//
// Scales: [groups >> scale_shift][1 or 2][16] of scale_bytes each: scales, then minima if any.
// Where groups share them, which are halves then, the groups' codes follow each: [1 << scale_shift]
// [1 or 2][16] signed bytes. Zero points of a group, [16] of zero_bytes each, follow its scales; of
// 8 bits they are signed and take two. Scales of rows, [16] floats, follow all groups.
enum class ScaleStorage : uint8_t {
  kFloats,
  kHalves,     // float16
  kExponents,  // of powers of two, as floats have them
  kBfloats,    // bfloat16
  kFp8         // e4m3
};
struct QuantizedLayout {
  int bits;
  ScaleStorage scale_storage;
  int scale_bytes;
  bool has_min;
  int zero_bytes;  // 0: no zero points but this one:
  int32_t zero_point;
  const int8_t* table;  // [16] that 4 bits index; null: the bits are the integers
  int64_t num_groups;
  int64_t group_size;        // all of K if one group; a multiple of 16 below 8 bits, of 32 at 5
  int scale_shift;           // above 0 where groups share scales
  int64_t scales_begin;      // bytes from the panel's begin
  int64_t row_scales_begin;  // likewise; 0: none
  int64_t panel_bytes;
  // Where products are of floats, codes of e4m3 or, of 4 bits, of 16 values in bf16.
  bool has_float_products;
  uint16_t values[16];
};

// One activation that is multiplied as a float.
struct Outlier {
  int32_t k;
  float x;
};

// Bytes of working memory for what is unpacked once and read by many rows: scales as floats,
// weights of 2, 3, 5 and 6 bits as bytes, codes as bf16. A quarter of the L2 of a Zen 4, half of
// the L2 of older CPUs with AVX2.
constexpr int64_t kUnpackedBytes = 262144;

// One thread's share of a product: the panels [panel_begin, panel_end).
struct QuantizedPart {
  QuantizedLayout layout;
  const int8_t* x;  // [m, k] integers, zero-padded to the layout's K and to whole quads
  int64_t x_stride;
  const IntegerGroup* groups;  // [m, num_groups]
  // In place of both where products are of floats: [m, k] f32, or bf16 from
  // LinearKernel::round_row, zero-padded to the layout's K; x_stride counts elements.
  const void* rows;
  // [m, outlier_stride] beside integers, of each row as many as counts [m] says; null: none.
  const Outlier* outliers;
  const int32_t* outlier_counts;
  int64_t outlier_stride;
  int64_t m, n;
  const uint8_t* weight;
  const float* bias;  // [n] or null
  float* out;         // [m, n]
  int64_t out_stride;
  bool accumulate;
  int64_t panel_begin, panel_end;
  uint8_t* unpacked;  // kUnpackedBytes where there are less than 8 bits, or products of floats
};

enum class CacheStorage : uint8_t { kF32, kBf16, kFp8 };
constexpr int kNumCacheStorages = 3;

// What all items of one call have in common.
struct AttentionCall {
  const float* q;
  int64_t q_token_stride, q_head_stride;
  const void* keys;         // [N, K, P, D]; in fp8 each block and head has P rows and then P scales
  const void* values;       // [N, K, P, Dv], likewise
  bool has_key_panels;      // keys lie in panels of kPanelWidth tokens, and Dv is a multiple of it
  bool has_values_in_keys;  // the first Dv elements of a key's row, of keys in rows
  bool fits_l1;             // tiles are prefetched into the L1, and not into the L2 alone
  int64_t heads_ahead;      // heads between prefetching a tile and its use; at most an item's
  int64_t kv_heads, block_size, head_dim, value_dim;
  int64_t group;  // query heads of a KV head
  float scale, soft_cap;
  const float* sinks;  // [query heads] or null
  int64_t window;
  void* out;  // f32, or bf16 where queries are rounded and Dv is whole vectors
  bool is_out_rounded;
  int64_t out_token_stride, out_head_stride;
};

// The running result of rows over the KV before a position at which a tile ends. Each head has
// attention_state_floats: first the result of the position's own span so far, if any, then that of
// the spans before it, if any. There may be more rows than an item has.
struct AttentionState {
  float* at;  // null: none
  int64_t head_stride;
  int64_t rows;       // of each head
  int64_t first_row;  // the item's
};

struct AttentionItem;
// A thread's items that follow the prefixes which sequences share. A prefix has many rows, so that
// walking it leaves memory idle. While its last tiles are walked, the tiles of these items are
// prefetched, and the kernels advance this record.
struct alignas(64) AttentionLater {  // one a thread
  const AttentionItem* item;         // the next one to prefetch
  const AttentionItem* end;
  int64_t head, position;  // of its next tile, or before the first one that it sees
  int64_t tiles_before;    // tiles of prefixes to walk before prefetching starts
};

// One piece of work, of one of two kinds.
//   A  Consecutive tokens of one sequence, the query heads of consecutive KV heads, and all of the
//      KV that they see or one span of it. Rows are [num_heads, num_tokens, group].
//   B  One token each of consecutive sequences whose KV begins in the same blocks, up to where it
//      differs. The result goes to `kept`, and each sequence's own item has it as `begun`.
struct AttentionItem {
  const int32_t* block_table;
  int64_t kv_head, num_heads;
  int64_t first_token;  // its row in q
  int64_t num_tokens;
  int64_t first_position;
  int64_t kv_begin, kv_end;  // bounds within what the tokens see
  float* partial;            // null: write to out; else the span's result, attention_partial_floats
  AttentionState kept, begun;  // up to kv_end, and before kv_begin
  AttentionLater* later;       // null: nothing to prefetch
};

struct RowMax {
  float max;
  int64_t idx;      // the lowest
  bool has_no_bad;  // neither NaN nor +inf
};

constexpr int kNumActivations = 0
#define LLMSERVE_ACTIVATION(enumerator, name, spellings) +1
#include "kernels/activations.inc"
    ;

// One instruction set's kernels. Pointers to memory of a file may be unaligned.
struct KernelTable {
  LinearKernel linear_f32, linear_bf16;
  // Rounds one row of x [k] to integers as LinearArgs (kernels/ops.h) says. q has room for whole
  // groups and quads, which it fills with zeros.
  void (*round_row)(const float* x, int64_t k, int64_t group_size, int8_t* q, IntegerGroup* groups);
  void (*quantized_linear)(const QuantizedPart* part);
  // Of a layout whose products are of floats; rows are as linear_bf16 takes them.
  void (*coded_linear)(const QuantizedPart* part);

  // Eight columns of a panel: to[16 * i + r] = word i of row r, for i < count. A word is an f32 or
  // a pair of bf16.
  void (*pack_words)(const void* const rows[8], int64_t count, float* to);
  // Rounds to nearest, ties to even. Subnormals and NaN stay.
  void (*to_bf16)(const float* x, int64_t n, uint16_t* to);
  // Whether any of n numbers has all the bits of `exponent`, as NaN and infinity have.
  bool (*any_non_finite_32)(const void* data, int64_t n, uint32_t exponent);
  bool (*any_non_finite_16)(const void* data, int64_t n, uint16_t exponent);

  // A row of a cache in fp8: the scale that round_row_to_fp8 (core/float_types.h) gives it, and the
  // codes of n of its elements.
  float (*fp8_row_scale)(const float* x, int64_t n);
  void (*round_to_fp8)(const float* x, int64_t n, float scale, uint8_t* codes);

  // `rows` is the largest num_heads * num_tokens * group of the items; with values in the keys,
  // whose items have one head each, in whole panels.
  int64_t (*attention_scratch_floats)(int64_t rows, int64_t head_dim, int64_t value_dim);
  // In the order of CacheStorage. `next` is the thread's next item or null: its first tiles are
  // prefetched towards the end of `item`.
  void (*attention[kNumCacheStorages])(const AttentionCall* call, const AttentionItem* item,
                                       const AttentionItem* next, float* scratch);
  int64_t (*attention_state_floats)(int64_t rows, int64_t value_dim);
  int64_t (*attention_partial_floats)(int64_t rows, int64_t value_dim);
  // Writes an item's output from the results of its spans, which lie one after another from
  // item->partial on.
  void (*merge_attention)(const AttentionCall* call, const AttentionItem* item, int64_t num_spans,
                          float* scratch);

  // One row each.
  void (*rms_norm)(const float* x, const float* weight, int64_t width, const NormNumbers* norm,
                   float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t width,
                     const NormNumbers* norm, float* out);        // bias or null
  void (*add)(float* x, const float* y, float scale, int64_t n);  // x += y * scale
  // In the order of Activation. `activate` is null for an activation of two inputs.
  void (*gated[kNumActivations])(const float* gate, const float* up, int64_t n, float* out);
  void (*activate[kNumActivations])(const float* x, int64_t n, float* out);
  void (*cap_logits)(float* x, int64_t n, float scale, float soft_cap);
  void (*rotary)(float* x, const float* cos, const float* sin, int64_t half, bool interleaved);

  // A token's experts and weights, and the sum of its experts' outputs: router.inc.
  void (*route_row)(const float* logits, int64_t n, const float* choice_bias,
                    const float* expert_scales, const RouterNumbers* numbers, int64_t k,
                    int32_t* ids, float* weights, float* room);
  void (*combine_row)(const float* x, int64_t stride, const int32_t* places, const float* weights,
                      int64_t k, int64_t width, const float* old, float* out);

  // Sampling, of one row each.
  // z = -inf where bit i % 32 of allowed[i / 32] is not set.
  void (*keep_allowed)(float* z, int64_t n, const uint32_t* allowed);
  RowMax (*row_max)(const float* x, int64_t n);
  float (*log_sum_exp)(const float* x, int64_t n, float max);  // log(sum exp(x - max))
  void (*scale_logits)(const float* x, int64_t n, float max, float temperature,
                       float* z);                           // z = (x - max) / temperature
  void (*keep_min_p)(float* z, int64_t n, float min_p);     // z = -inf unless exp(z) >= min_p
  void (*weights)(const float* z, int64_t n, uint32_t* w);  // floor(exp(z) * 2^30)
  // Index of the largest z + noise. z[likely] is 0, the largest z.
  int64_t (*gumbel_argmax)(const float* z, int64_t n, uint64_t seed, int64_t position,
                           int64_t likely);
  // The first index >= begin with x > threshold, or n.
  int64_t (*next_greater)(const float* x, int64_t begin, int64_t n, float threshold);

  // Only reads: how fast the machine can, for benchmarks.
  uint32_t (*read_loop)(const void* data, int64_t num_bytes, bool is_to_l1);
};

// Whole tables.
namespace generic {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
// Products that replace entries of avx2's table, or of avx512's.
namespace avx_vnni {
void quantized_linear(const QuantizedPart* part);
}
namespace avx512_vnni {
void quantized_linear(const QuantizedPart* part);
}
namespace avx512_bf16 {
extern const LinearKernel kLinear;
void coded_linear(const QuantizedPart* part);
void attention_bf16(const AttentionCall* call, const AttentionItem* item, const AttentionItem* next,
                    float* scratch);
void attention_fp8(const AttentionCall* call, const AttentionItem* item, const AttentionItem* next,
                   float* scratch);
void merge_attention_rounded(const AttentionCall* call, const AttentionItem* item,
                             int64_t num_spans, float* scratch);
}  // namespace avx512_bf16
namespace amx {
extern const LinearKernel kLinear;
void quantized_linear(const QuantizedPart* part);
}  // namespace amx

}  // namespace llmserve::cpu
