// The kernels' launch functions, with plain pointers and numbers: what nvcc compiles knows nothing
// of tensors, and what knows tensors (cuda_backend.cpp) needs no nvcc. The contracts are those of
// kernels/ops.h; arguments have been validated. All pointers are device memory, strides are in
// elements, work goes to `stream`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/cuda/launch_math.h"
#include "kernels/draw_records.h"
#include "kernels/op_numbers.h"

namespace llmserve::cuda {

// How elements of tables, weights and caches are stored.
enum class Storage : uint8_t { kF32, kBF16, kF16, kF8 };

// A row-major matrix of floats whose rows may be strided.
struct Rows {
  float* data;
  int64_t stride;
};
struct ConstRows {
  const float* data;
  int64_t stride;
};

void embedding(const void* table, Storage storage, int64_t table_stride, const int32_t* token_ids,
               int64_t num_tokens, int64_t width, float scale, Rows out, cudaStream_t stream);

// Row r is head r % num_heads of token r / num_heads; whole tokens are one head each.
struct NormParams {
  ConstRows x;    // the stride is a token's
  Rows residual;  // data null: x alone is normalised; otherwise x is added to it first
  const float* weight;
  Rows out;
  int64_t num_rows;
  int64_t width;
  NormNumbers numbers;
  uint16_t* rounded = nullptr;  // [num_rows, width] bf16, written in place of out
  int64_t num_heads = 1;
  int64_t x_head_stride = 0;
  int64_t out_head_stride = 0;
};
void rms_norm(const NormParams& params, cudaStream_t stream);

struct LayerNormParams {
  ConstRows x;
  const float* weight;
  const float* bias;  // or null
  Rows out;
  int64_t num_rows;
  int64_t width;
  NormNumbers numbers;
};
void layer_norm(const LayerNormParams& params, cudaStream_t stream);

// out += x * scale.
void add(Rows out, ConstRows x, int64_t num_rows, int64_t width, float scale, cudaStream_t stream);

// Whether kernels that this thread launches may start before the one ahead of them on the stream
// has ended (programmatic dependent launch, compute capability 9.0 and later).
inline thread_local bool starts_early = false;
// Whether the kernels that run on this device wait for the one ahead of them by themselves: those
// compiled for a GPU before that do not, also where a later one has made its own of their PTX.
bool kernels_wait();

struct LinearParams {
  ConstRows x;
  const void* weight;  // row-major [N, K] f32 or bf16
  Storage storage;
  const float* bias;  // [N] or null
  Rows out;
  int64_t num_rows;      // M
  int64_t out_features;  // N
  int64_t in_features;   // K
  bool accumulate;
};
// Tiled, on CUDA cores: each output is one chain of multiply-adds over K in order, whatever M is.
// x is rounded to bf16 where the weight is bf16.
void plain_linear(const LinearParams& params, cudaStream_t stream);
// By tensor cores: x [M, K] bf16, contiguous, in place of params.x; a bf16 weight whose K is a
// multiple of 8 and which is aligned to 16 bytes. Each output is one chain over K, whatever M is.
void mma_linear(const uint16_t* x, const LinearParams& params, cudaStream_t stream);
// Once before the first call, on the device, and not within a capture.
void prepare_mma_linear();

// What a product does to x before and to its outputs after; by gemv with the bits of rms_norm and
// activation.
struct LinearFusion {
  const float* norm_weight = nullptr;  // [K], or no norm
  NormNumbers norm;
  int norm_threads = 0;   // rms_threads(K)
  bool is_gated = false;  // out is [M, N / 2]: the gate is column c, beside column N / 2 + c
  Activation activation = Activation::kSilu;
};
// For at most kGemvMaxRows rows: limited by the reading of the weight. Each output is 32 chains
// over K, the same for every M. x is rounded as above.
void gemv(const LinearParams& params, const LinearFusion& fusion, cudaStream_t stream);
// For at most kMmaGemvMaxRows rows and a bf16 weight, where can_mma_gemv(), on compute capability
// 8.0 and later. A norm's bits are its own: its factor comes after the product.
void mma_gemv(const LinearParams& params, const LinearFusion& fusion, cudaStream_t stream);
bool can_mma_gemv(const LinearParams& params, const LinearFusion& fusion);
// to [num_rows, width] bf16, contiguous: x rounded to nearest even.
void round_to_bf16(ConstRows x, int64_t num_rows, int64_t width, uint16_t* to, cudaStream_t stream);
// Weights at load: contiguous f32, bf16 or f16 to f32 or bf16.
void convert(const void* from, Storage from_storage, int64_t n, void* to, Storage to_storage,
             cudaStream_t stream);

// As in RotaryTableArgs.
struct RotaryScale {
  float factor;
  float growth;
  int32_t period;
};
void rotary_table(const int32_t* positions, int64_t num_tokens, const float* inv_freq, int64_t half,
                  const RotaryScale& scale, Rows cos_sin, cudaStream_t stream);

struct RotaryParams {
  float* heads;
  int64_t token_stride;
  int64_t head_stride;
  int64_t num_tokens;
  int64_t num_heads;
  ConstRows cos_sin;
  int64_t half;
  bool interleaved;
  float* out;  // where the heads [width] go; null: where they are
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t width;
};
void rotary(const RotaryParams& params, cudaStream_t stream);

// One half of the cache, [N, K, P, D] as cache_part of ops.h lays it out.
struct CachePart {
  void* data;
  int64_t num_heads;    // K
  int64_t block_size;   // P
  int64_t width;        // D or Dv
  int64_t head_stride;  // elements from a block's head to the next
  int64_t row_stride;   // from a row to the next: D of values that are in the keys
};

struct StoreParams {
  const float* from;  // [T, K, D]
  int64_t token_stride;
  int64_t head_stride;
  int64_t num_tokens;
  const int64_t* slots;  // [T]; -1 skips
  CachePart cache;
  Storage storage;  // kF32, kBF16 or kF8
};
void store_cache(const StoreParams& params, cudaStream_t stream);

// As in PrepareQkvArgs. Heads of a token lie side by side.
struct QkvParams {
  Rows q;               // the stride is a token's
  ConstRows k;          // likewise; read only
  ConstRows v;          // likewise
  const float* q_norm;  // [D] or null
  const float* k_norm;
  NormNumbers norm;
  ConstRows q_cos_sin;  // data null: no rotation
  ConstRows k_cos_sin;
  int64_t half;  // of the rotated width
  bool interleaved;
  int64_t num_tokens;
  int64_t num_heads;     // H
  const int64_t* slots;  // [T]; -1 skips
  CachePart keys;
  CachePart values;
  Storage storage;       // of both
  int64_t token_blocks;  // qkv_blocks(H + 2 K)
  int norm_threads;      // rms_threads(D)
};
void prepare_qkv(const QkvParams& params, cudaStream_t stream);
// Whether registers hold heads so: whole fours, aligned, whose pairs are where lanes look for them.
bool can_hold_heads(const QkvParams& params);

struct AttentionParams {
  const float* q;  // [T, H, D]
  int64_t q_token_stride;
  int64_t q_head_stride;
  CachePart keys;
  CachePart values;
  Storage storage;              // of both
  const int32_t* query_starts;  // [B + 1]
  const int32_t* kv_lens;       // [B]
  const int32_t* block_tables;  // [B, M]
  int64_t num_sequences;
  int64_t max_blocks;
  int64_t num_tokens;
  int64_t num_heads;
  float scale;
  int32_t window;
  float soft_cap;
  const float* sinks;  // [H] or null
  float* out;          // [T, H, Dv]
  int64_t out_token_stride;
  int64_t out_head_stride;
  // Sequences of so many query heads of tokens that read one KV head, and more, are wgmma_kernels';
  // others are tiled_kernels'.
  int64_t wgmma_rows = std::numeric_limits<int64_t>::max();
};
void paged_attention(const AttentionParams& params, cudaStream_t stream);

// A gated one takes rows of 2 * width.
void activation(ConstRows x, int64_t num_rows, int64_t width, Activation kind, bool is_gated,
                Rows out, cudaStream_t stream);
void cap_logits(Rows logits, int64_t num_rows, int64_t width, float scale, float soft_cap,
                cudaStream_t stream);
void gather_rows(ConstRows x, const int32_t* rows, int64_t num_rows, int64_t width, Rows out,
                 cudaStream_t stream);

// A list of a step's sampling: entries from byte `begin` of its data on.
struct DrawList {
  int64_t begin = 0;
  int64_t count = 0;
};
struct DrawBias {
  int32_t token_id;
  float bias;
};
struct DrawCount {
  int32_t token_id;
  int32_t num_generated;
};
// What the blocks of a row tell each other: zero before a draw and after it, but for raw_max. A
// place is a value and its token, ordered (row_passes.cuh).
struct DrawState {
  unsigned long long raw_best;    // place of the largest of the raw logits
  unsigned long long best;        // of those to draw from; then 0 unless something is to be drawn
  unsigned long long best_score;  // of z + noise
  uint32_t num_scanned;           // blocks that have done their part of the first pass
  uint32_t num_drawn;             // of the second
  float raw_max;
};
// One row of logits to draw from, as in SampleRow.
struct DrawRow {
  const float* raw;  // [V] the logits; null: nothing is drawn
  DrawSettings draw;
  uint64_t seed;
  int64_t position;
  int32_t forced_token_id;  // -1: none
  bool is_edited;
  DrawList logits;            // floats [V] in place of raw; or none
  DrawList biases;            // DrawBias
  DrawList allowed;           // words of 32 bits
  DrawList banned;            // int32
  DrawList counts;            // DrawCount
  const int32_t* late_token;  // counted once more than `counts` has it, as generated; or null
  DrawState state;
};
// rows, out [S], `data` what their lists lie in; z [S, V] is working memory.
void draw(DrawRow* rows, int64_t num_rows, const std::byte* data, int64_t vocabulary, float* z,
          DrawnRow* out, cudaStream_t stream);

// A row whose log-probabilities are wanted.
struct ReportRow {
  const float* raw;        // [V]
  int64_t top_begin;       // of its best tokens in `top`
  int32_t num_top;         // at most V
  int32_t row;             // of what was drawn
  unsigned long long sum;  // zero before a report and after it
  uint32_t num_added;      // likewise: blocks that have added theirs
};
struct Report {
  float max;
  float log_sum;  // log(sum(exp(x - max)))
};
struct TopEntry {
  int32_t token_id;
  float logit;
};
// After draw() of `draw_rows`, of which `drawn` came. out [rows]. Each row's num_top largest, in no
// order; ties to the lowest id. Rows that are not valid have no numbers in either.
void report(ReportRow* rows, int64_t num_rows, const DrawRow* draw_rows, const DrawnRow* drawn,
            int64_t vocabulary, Report* out, TopEntry* top, cudaStream_t stream);

// A token whose rank in a row is wanted: `token_id`, or if negative what `drawn` is for the row.
struct RankQuery {
  const float* raw;  // [V]
  int32_t token_id;
  int32_t row;
  uint32_t num_larger;   // zero before and after
  uint32_t num_counted;  // likewise: blocks that have added theirs
};
struct Ranked {
  float logit;
  int32_t rank;  // 1 + the number of larger ones
};
void rank(RankQuery* queries, int64_t num_queries, const DrawnRow* drawn, int64_t vocabulary,
          Ranked* out, cudaStream_t stream);

// -- between two steps (cuda_steps.h) -----------------------------------------------------------

// Of a step, read on the device.
struct StepHeader {
  int64_t step;
  int64_t num_rows;      // S
  int64_t result_begin;  // bytes
};
// token_ids[t] = drawn[awaited_rows[t]], where that is not -1; both [T].
void take_awaited(const DrawnRow* drawn, const int32_t* awaited_rows, int64_t num_tokens,
                  int32_t* token_ids, cudaStream_t stream);
// rows, draws [S']: each draws from its row of logits, unedited. They are rows [first_row, …) of
// the step; those beyond its num_rows draw nothing.
void make_draw_rows(const StepHeader* header, int64_t first_row, const SeededDraw* draws,
                    ConstRows logits, int64_t num_rows, DrawRow* rows, cudaStream_t stream);
// drawn [S] to results + result_begin + rows_begin, in mapped memory of the host, then the step's
// number to results + result_begin, by a release store.
void publish(const StepHeader* header, const DrawnRow* drawn, void* results, int64_t rows_begin,
             cudaStream_t stream);

}  // namespace llmserve::cuda
