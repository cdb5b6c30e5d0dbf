// What an instruction set's object files offer: functions over raw pointers and plain structs, most
// of them in one table (cpu_features.cpp says which set has which). The files of isa/ include
// nothing of the project but this and definition-only .inc files, since an inline function compiled
// for AVX-512 could be merged into everybody's.
#pragma once

#include <stdint.h>

namespace llmserve::cpu {

// Columns of a packed weight panel: one AVX-512 vector, two of AVX2, one row of an AMX tile. A
// panel is one contiguous stream: f32 [K][16], bf16 [ceil(K/2)][16][2] (K in pairs, an odd K padded
// with zero), and a weight is [ceil(N/16)] panels.
constexpr int64_t kPanelWidth = 16;

// Blocks of a matrix product of many rows (linear.inc has others for bf16 rows). 512 K of a bf16
// panel are 16 KiB, half of the smallest L1; 96 rows (a multiple of every row tile) of 512 f32 are
// 192 KiB, less than half of an L2 of 512 KiB and more; 32 panels bound the partial sums, 96 x 512
// f32, to as much.
constexpr int64_t kRowBlock = 96;
constexpr int64_t kDepthBlock = 512;
constexpr int64_t kPanelBlock = 32;
// Few rows take more of K at once, as long as their block of this many floats is half of the L1.
constexpr int64_t kFewRowsFloats = 4096;
// Keeps the rows of a copied block from falling into the same sets of the L1.
constexpr int64_t kRowPadding = 16;

constexpr int kNumActivations = 5;

// One thread's share of a linear layer: panels [panel_begin, panel_end).
struct LinearPart {
  const void* x;  // [m, k] f32, or bf16 from LinearKernel::round_row; row stride x_stride
  int64_t x_stride;
  int64_t m, n, k;
  const void* weight;  // packed
  const float* bias;   // [n] or null
  float* out;          // [m, n], row stride out_stride
  int64_t out_stride;
  bool accumulate;
  int64_t panel_begin, panel_end;
  float* scratch;  // LinearKernel::scratch_floats
};

// The other way round: rows of weights as they lie in a file, and x packed in their place.
struct TurnedPart {
  const void* rows;  // [n, k], n >= kPanelWidth and an even k
  int64_t n, k;
  int64_t row_begin, row_end;  // of the n: whose outputs are written
  const void* x;               // [m, k] in panels, of f32 or what round_row makes of it
  int64_t m;
  const float* bias;  // [n] or null
  float* out;         // [m, n], row stride out_stride
  int64_t out_stride;
  bool accumulate;
};

// A linear layer over weights of one dtype: each output is one sum over k in order, in the steps of
// the kernel's own instruction, then + bias, then + old.
struct LinearKernel {
  // Null, or what makes of a row of x [k], or of some columns of it, the bf16 that `run` takes; an
  // odd k is followed by a zero. What else is left of k's last cache line is to be zero, too.
  void (*round_row)(const float* x, int64_t k, uint16_t* to);
  int64_t (*scratch_floats)(int64_t m, int64_t k);
  void (*run)(const LinearPart* part);
  // Null where a piece of a part takes more time for being by itself; or panels of the least that
  // does not.
  int64_t (*piece_panels)(int64_t m) = nullptr;
  // Null where sums would be others than those of `run`, or it has not been measured.
  void (*run_turned)(const TurnedPart* part) = nullptr;
  // Rows of x a panel of them; with fewer, packing the weight takes as long.
  int64_t turned_at_least = 0;
};

// A group of a row of x as integers.
struct IntegerGroup {
  float scale;
  float scaled_sum;  // scale * float(sum)
  int32_t sum;
};

// The layout of a quantized weight: panels of kPanelWidth columns. A panel is its integers, then
// scales (or scales and minima) [groups >> scale_shift][1 or 2][16] of scale_bytes; where groups
// share them, each with its groups' codes behind it, [1 << scale_shift][1 or 2][16] signed bytes.
// It is padded to whole cache lines. Scales of several groups are not floats; exponents go with a
// table.
// Integers of 8 bits lie as [ceil(K / 4)][16][4], K in quads as the dot products of bytes
// take them; those of 4 bits as [K / 8][16][4], a byte's low half of one quad and the high half of
// the next. Of 5 or 6 bits, each 8 or 4 quads are [1][16][4] of their upper bits, a byte's lowest
// ones those of the first quad, and then the lower 4 bits of all, as above. Of 2 or 3 bits, each 4
// quads are [1][16][4] of their lower 2, the first quad's lowest, and of 3 then [16][2] of their
// third bits, 4 for each of the 64 places, the first place's and the first quad's lowest.
struct QuantizedLayout {
  int bits;
  int scale_bytes;  // 4: floats; 2: float16; 1: exponents of powers of two, as floats have them
  bool has_min;
  int32_t zero_point;
  const int8_t* table;  // [16] that 4 bits index; null: they are the integers
  int64_t num_groups;
  int64_t group_size;    // the whole K if one group; a multiple of 16 below 8 bits, of 32 if 5
  int scale_shift;       // above 0 where there are codes
  int64_t scales_begin;  // bytes from the panel's begin
  int64_t panel_bytes;
};

// Working memory for what is made of panels of less than 8 bits that many rows pass: scales as
// floats, weights of other than 4 bits as bytes. A quarter of the L2 of a Zen 4, half of that of
// older CPUs with AVX2.
constexpr int64_t kRoomBytes = 262144;

// One thread's share of a linear layer over integers.
struct QuantizedPart {
  QuantizedLayout layout;
  const int8_t* x;  // [m, k] as integers, zero-padded to whole quads
  int64_t x_stride;
  const IntegerGroup* groups;  // [m, num_groups]
  int64_t m, n;
  const uint8_t* weight;
  const float* bias;  // [n] or null
  float* out;         // [m, n], row stride out_stride
  int64_t out_stride;
  bool accumulate;
  int64_t panel_begin, panel_end;
  uint8_t* room;  // kRoomBytes where there are less than 8 bits
};

enum class CacheStorage : uint8_t { kF32, kBf16, kFp8 };
constexpr int kNumCacheStorages = 3;

struct AttentionCall {
  const float* q;
  int64_t q_token_stride, q_head_stride;
  const void* keys;    // [N, K, P, D]; in fp8, the P rows of a block and head and then their scales
  const void* values;  // [N, K, P, Dv]; likewise
  bool has_key_panels;  // keys lie in panels of kPanelWidth tokens, and Dv is a multiple of it
  bool fits_l1;  // whether the tiles that are prefetched go to the L1, too, or to the L2 alone
  int64_t heads_ahead;  // how many heads later they are used; at most an item's
  int64_t kv_heads, block_size, head_dim, value_dim;
  int64_t group;  // query heads a KV head
  float scale, soft_cap;
  int64_t window;
  void* out;  // f32 or, where queries are rounded to bf16 and Dv is whole vectors, bf16
  bool is_out_rounded;
  int64_t out_token_stride, out_head_stride;
};

// What rows have of the KV before a position that whole tiles end at: attention_state_floats of
// each head's rows, which may be more than an item's. First what the position's span has so far,
// if any, then what the spans before it have, if any.
struct AttentionState {
  float* at;  // null: none
  int64_t head_stride;
  int64_t rows;       // of each head
  int64_t first_row;  // the item's
};

struct AttentionItem;
// What a thread attends to when it is done with what sequences share. It is prefetched while the
// last tiles of that are walked, whose many rows leave memory idle; the kernels move on.
struct alignas(64) AttentionLater {  // one a thread
  const AttentionItem* item;         // the next one to prefetch
  const AttentionItem* end;
  int64_t head, position;  // of its next tile, or before the first one that it sees
  int64_t tiles_before;    // of what is shared, to be walked first
};

// Consecutive tokens of one sequence and the query heads of consecutive KV heads; all of the KV
// that they see, or one span of it. Rows are [num_heads, num_tokens, group]. Or one token each of
// consecutive sequences whose KV begins in the same blocks, up to where it differs: `kept` is then
// what they go on from, each as an item of its own, as `begun`.
struct AttentionItem {
  const int32_t* block_table;
  int64_t kv_head, num_heads;
  int64_t first_token;  // its row in q
  int64_t num_tokens;
  int64_t first_position;
  int64_t kv_begin, kv_end;  // limits, beside what the tokens see
  float* partial;            // null: write to out; else the span's result, attention_partial_floats
  AttentionState kept, begun;  // of the KV up to kv_end, and before kv_begin
  AttentionLater* later;       // null: nothing
};

struct RowMax {
  float max;
  int64_t idx;      // the lowest
  bool has_no_bad;  // neither NaN nor +inf
};

struct KernelTable {
  // Matrix products.
  LinearKernel linear_f32, linear_bf16;
  // One row of x [k] as integers: kernels/ops.h, LinearArgs. q has room for whole quads.
  void (*round_row)(const float* x, int64_t k, int64_t group_size, int8_t* q, IntegerGroup* groups);
  void (*quantized_linear)(const QuantizedPart* part);

  // Eight columns of a panel: to[16 * i + r] = word i of row r, for i < count. A word is an f32 or
  // a pair of bf16; rows may be unaligned.
  void (*pack_words)(const void* const rows[8], int64_t count, float* to);
  // x as bf16, to nearest, ties to even; subnormals stay, as does NaN.
  void (*to_bf16)(const float* x, int64_t n, uint16_t* to);
  // Whether any of n numbers has all the bits of `exponent`: NaN and infinity do. Unaligned is
  // fine.
  bool (*any_non_finite_32)(const void* data, int64_t n, uint32_t exponent);
  bool (*any_non_finite_16)(const void* data, int64_t n, uint16_t exponent);

  // A row of a cache in fp8: the scale that round_row_to_fp8 (core/float_types.h) gives it, and its
  // codes from any element on.
  float (*fp8_row_scale)(const float* x, int64_t n);
  void (*round_to_fp8)(const float* x, int64_t n, float scale, uint8_t* codes);

  // Attention of one item; `rows` is the largest num_heads * num_tokens * group of the
  // items.
  int64_t (*attention_scratch_floats)(int64_t rows, int64_t head_dim, int64_t value_dim);
  // In the order of CacheStorage. `next` is prefetched towards the end: what this thread does
  // after, or null.
  void (*attention[kNumCacheStorages])(const AttentionCall* call, const AttentionItem* item,
                                       const AttentionItem* next, float* scratch);
  int64_t (*attention_state_floats)(int64_t rows, int64_t value_dim);
  // Writes an item's output from the partial results of its spans, which lie one after another from
  // item->partial on.
  int64_t (*attention_partial_floats)(int64_t rows, int64_t value_dim);
  void (*merge_attention)(const AttentionCall* call, const AttentionItem* item, int64_t num_spans,
                          float* scratch);

  // One row each.
  void (*rms_norm)(const float* x, const float* weight, int64_t width, float eps,
                   float weight_offset, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t width,
                     float eps, float weight_offset, float* out);  // bias or null
  void (*add)(float* x, const float* y, float scale, int64_t n);   // x += y * scale
  // In the order of Activation (kernels/ops.h).
  void (*gated[kNumActivations])(const float* gate, const float* up, int64_t n, float* out);
  void (*activate[kNumActivations])(const float* x, int64_t n, float* out);
  void (*cap_logits)(float* x, int64_t n, float scale, float soft_cap);
  void (*rotary)(float* x, const float* cos, const float* sin, int64_t half, bool interleaved);

  // Sampling.
  // z = -inf where bit i % 32 of allowed[i / 32] is not set.
  void (*keep_allowed)(float* z, int64_t n, const uint32_t* allowed);
  RowMax (*row_max)(const float* x, int64_t n);
  float (*log_sum_exp)(const float* x, int64_t n, float max);  // log(sum exp(x - max))
  void (*scale_logits)(const float* x, int64_t n, float max, float temperature,
                       float* z);                           // z = (x - max) / temperature
  void (*keep_min_p)(float* z, int64_t n, float min_p);     // z = -inf unless exp(z) >= min_p
  void (*weights)(const float* z, int64_t n, uint32_t* w);  // floor(exp(z) * 2^30)
  // Index of the largest z + noise, z[likely] being 0, the largest z.
  int64_t (*gumbel_argmax)(const float* z, int64_t n, uint64_t seed, int64_t position,
                           int64_t likely);
  // The first index >= begin with x > threshold, or n.
  int64_t (*next_greater)(const float* x, int64_t begin, int64_t n, float threshold);

  // The machine's limit, for benchmarks: only reads.
  uint32_t (*read_loop)(const void* data, int64_t num_bytes, bool is_to_l1);
};

namespace generic {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
// Sets that add products to avx2's vectors, or to avx512's.
namespace avx_vnni {
void quantized_linear(const QuantizedPart* part);
}
namespace avx512_vnni {
void quantized_linear(const QuantizedPart* part);
}
namespace avx512_bf16 {
extern const LinearKernel kLinear;
// Over bf16, and over fp8.
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
