// The arguments of every op, written once: shapes, dtypes, aliasing. op_list.inc lists the ops,
// backends implement them (backend.h), and the `ref` backend is the executable specification.
//
// Shape letters (docs/glossary.md): T tokens this step, B sequences, S rows sampled, H query heads,
// K KV heads, D head dim of queries and keys, Dv of values, E model dim, F FFN dim, V vocabulary, N
// blocks in the pool, P tokens a block, M max blocks a sequence, X experts, R any number of rows.
//
// Unless said otherwise: tensors lie in the backend's memory and spans in the host's, activations
// are float32, the last dimension is contiguous, an output may not overlap an input, and a row's
// result depends on that row's inputs alone, bit for bit, whatever the other rows are.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/buffer.h"
#include "core/draw_settings.h"
#include "core/tensor.h"
#include "kernels/op_numbers.h"
#include "quant/quant_format.h"

namespace llmserve {

// Rows that a request brought along, in host memory: out[begin + i] = rows[i] as they are.
struct GivenRows {
  int64_t begin = 0;
  int64_t count = 0;
  const float* rows = nullptr;  // [count, E]
};

// out[t] = table[token_ids[t]] * scale, or the given row.
struct EmbeddingArgs {
  ConstTensor table;                   // [V, E] f32, bf16 or f16; u8 [V, bytes of a row] of blocks
  std::span<const int32_t> token_ids;  // [T], each in [0, V)
  Tensor out;                          // [T, E]
  float scale = 1.0f;
  std::span<const GivenRows> given;  // of some tokens, whose ids do not matter then
  // What the table is in, as its file has it: on host backends, whose rows are dequantized as they
  // are asked for.
  const QuantFormat* blocks = nullptr;
};

// out[r] = the norm of x[r] (NormNumbers). Zhang & Sennrich 2019, eq. 4. A row is a token's
// activations, or one of its heads (Qwen3's query and key norms).
struct RmsNormArgs {
  ConstTensor x;       // [R, D] or [T, H, D]; rows, or tokens and heads, may be strided
  ConstTensor weight;  // [D] f32
  Tensor out;          // of x's shape; may be x itself
  NormNumbers numbers;
};

// residual += x; out = rms_norm(residual).
struct AddRmsNormArgs {
  Tensor residual;     // [T, E], updated in place
  ConstTensor x;       // [T, E]
  ConstTensor weight;  // [E] f32
  Tensor out;          // [T, E]; may be x itself
  NormNumbers numbers;
};

// out[r] = the norm of the deviations x[r] - mean(x[r]) (NormNumbers) (+ bias). Ba et al. 2016, eq.
// 4. Works on heads too: rows of [R, D] with a row stride.
struct LayerNormArgs {
  ConstTensor x;       // [R, D]; rows may be strided
  ConstTensor weight;  // [D] f32
  ConstTensor bias;    // [D] f32, or none
  Tensor out;          // [R, D]; may be x itself
  NormNumbers numbers = {.eps = 1e-5f};
};

// out[r] += x[r] * scale, the product rounded to f32.
struct AddArgs {
  Tensor out;     // [R, E]; rows may be strided
  ConstTensor x;  // [R, E]; rows may be strided
  float scale = 1.0f;
};

// A weight of floats that runs on its rows until it is packed: Backend::defer_linear, pack_rows.
struct LinearRows {
  std::vector<ConstTensor> parts;  // [N_i, K], stacked along N; somebody keeps their memory
  DType dtype = DType::kF32;       // of the weight
  Buffer packed;                   // the backend's own layout, untouched until is_packed
  bool is_packed = false;
};

// A linear layer's weight in the layout its backend prefers; made once at load by
// Backend::pack_linear, defer_linear or pack_quantized, read-only after.
struct LinearWeight {
  int64_t out_features = 0;  // N
  int64_t in_features = 0;   // K
  DType dtype = DType::kF32;
  const LinearFormat* format = nullptr;  // null: floats of `dtype`
  Buffer data;                           // the backend's own layout, unless it is mapped:
  std::span<const std::byte> mapped;     // the same bytes in a file
  std::shared_ptr<const void> file;      // keeps them
  std::shared_ptr<LinearRows> rows;      // instead of both, where it is packed later
  // [K]: column i of the weight multiplies x's column (*input_order)[i]. Null: its own. Only beside
  // a format; set by whoever packs the weight.
  std::shared_ptr<const std::vector<int32_t>> input_order;
  const std::byte* bytes() const {
    if (rows) return rows->packed.data();
    return mapped.empty() ? data.data() : mapped.data();
  }
  int64_t num_bytes() const {
    if (rows) return rows->packed.num_bytes();
    return mapped.empty() ? data.num_bytes() : std::ssize(mapped);
  }
};

// out = x W^T (+ bias) (+ out, if accumulate). Each output is one chain of multiply-adds over K in
// order, so that a row's bits do not depend on M.
//
// With a weight of integers, x is rounded to integers as well, each row and group of K for itself:
// a = max |x| of the group, s = a / 127, q = x * (127 / a) rounded to the nearest integer, ties to
// even; q and s are 0 where a < 1e-30, and q is 0 and s NaN where a is not finite. Then, with Q the
// weight's integers less their zero point, and groups g in order, from sum = 0,
//   sum = sum + (scale[n, g] * s[m, g]) * float(sum_k q[m, k] * Q[n, k])   over k in g
//   sum = sum - min[n, g] * (s[m, g] * float(sum_k q[m, k]))   where the format has minima
// each operation rounded to f32, none fused, then sum = sum * row_scale[n] where rows have scales,
// and out = (sum + bias) + old. Sums of integers are exact, so that every backend gives the same
// bits. Per-token scales: Dettmers et al. 2022, section 2; groups: Frantar et al. 2022, section 4.
//
// With an outlier threshold (Dettmers et al. 2022, section 3), the finite x[m, k] of that magnitude
// and more count as 0 above, and out = out + scale[n] * (the sum of x[m, k] * Q[n, k] over these k,
// in order, unfused).
//
// With a weight of fp8 or of values that are floats, x stays in floats, or is rounded to bf16 where
// the backend does so beside bf16 weights, and sum = sum + scale[n, g] * (one chain over k in g), a
// fused multiply-add, groups in order from 0. The chain is that of a bf16 weight.
struct LinearArgs {
  ConstTensor x;  // [M, K]; rows may be strided
  const LinearWeight* weight = nullptr;
  ConstTensor bias;         // [N] f32, or none
  Tensor out;               // [M, N]; rows may be strided
  bool accumulate = false;  // adds to what out holds (residual connections)
};

// out[r] = x[r / n] W^T (+ bias[w]) with w = weight_ids[r], W = weights[w] and R = T n, each row
// with the bits that linear gives it alone: experts of a mixture, adapters of sequences. A weight
// that no row asks for costs nothing. Of an id below 0, the row of out stays as it is.
struct GroupedLinearArgs {
  ConstTensor x;                                 // [T, K]; rows may be strided
  std::span<const LinearWeight* const> weights;  // [X], alike but for their values
  // [R] i32, contiguous, each below X: host backends check that, others trust route_experts.
  ConstTensor weight_ids;
  ConstTensor bias;  // [X, N] f32, or none
  Tensor out;        // [R, N]; rows may be strided
};

// Of each token the k experts with the largest score s, best first, and their weights. With l the
// router's logits, s is as RouterScore says (softmax of l, sigmoid of l, or l). An expert is chosen
// by s + choice_bias, ties to the lower id, within the best groups (RouterNumbers), whose scores
// are of s + choice_bias, too. Its weight w is s, without the bias, or, of kSoftmaxOfChosen and
// kSigmoidOfChosen, a function of the chosen logits; then w / (max(sum, sum_floor) + sum_eps),
// where they are normalised, * scale, * expert_scales[id]. Sums are in order of ids, or of slots,
// so that all backends give the same bits.
//
// kSparsemixer chooses the largest of l, slot by slot. With m that largest, its weight is its
// softmax among the experts not chosen before with (m - l) / max(|l|, m) <= 2 * jitter.
//
// Softmax: Shazeer et al. 2017; sigmoid, choice bias and groups: DeepSeek-AI 2024, section 2.1.2;
// sparsemixer: Liu et al. 2024 (GRIN), section 3.
struct RouteExpertsArgs {
  ConstTensor logits;         // [T, X]; rows may be strided
  ConstTensor choice_bias;    // [X], or none
  ConstTensor expert_scales;  // [X], or none
  RouterNumbers numbers;
  Tensor ids;      // [T, k] i32, contiguous; k <= X
  Tensor weights;  // [T, k], contiguous
};

// out[t] = sum_i weights[t, i] * x[t * k + i] (+ out[t], if accumulate): the product of slot 0,
// then multiply-adds in order of slots, then the old value. A slot of weight 0 is not read.
struct CombineExpertsArgs {
  ConstTensor x;        // [R, E], R = T k; rows may be strided
  ConstTensor weights;  // [T, k], contiguous
  Tensor out;           // [T, E]; rows may be strided
  bool accumulate = false;
};

// cos_sin[t] = (cos(a_0) … cos(a_{d/2-1}), sin(a_0) …) * scale with a_i = positions[t] *
// inv_freq[i] rounded to f32, and * (1 + growth * ln(1 + floor(positions[t] / period))), by which
// Llama 4 and Ministral 3 scale queries. Once a step; every layer reads it. Su et al. 2021, section
// 3.2.
struct RotaryTableArgs {
  std::span<const int32_t> positions;  // [T]
  std::span<const float> inv_freq;     // [d/2], d the rotated width
  float scale = 1.0f;                  // attention factor of yarn and kin
  float growth = 0.0f;
  int32_t period = 1;  // tokens, positive
  Tensor cos_sin;      // [T, d]
};

// Rotates the first d elements of every head in place: halves (x_i, x_{i+d/2}) or, interleaved,
// pairs (x_2i, x_2i+1).
struct RotaryArgs {
  Tensor heads;         // [T, H, D]; tokens and heads may be strided
  ConstTensor cos_sin;  // [T, d], d <= D even
  bool interleaved = false;
  Tensor out;  // [T, H, D], likewise: where the heads go instead, and stay as they are; or none
};

// How the keys of one block and KV head lie in memory; values lie as [P][Dv].
enum class KeyLayout : uint8_t {
  kRows,    // [P][D]
  kPanels,  // 16 tokens to a panel, as a weight is packed: f32 [P/16][D][16], bf16
            // [P/16][D/2][16][2], f8 [P/16][D/4][16][4]; P is a multiple of 16 and, in bf16, D even
};
inline constexpr int64_t kKeyPanelTokens = 16;

// Keys or values in f8 (e4m3, core/math/fp8.inc) have a scale a row, f32 and a power of two, set
// with the row and never changed: an element is its code times the scale, exactly. The P scales of
// a block and head follow its rows, so that rows are contiguous and blocks are still one piece.
// D and Dv are multiples of 4, so that scales are aligned.
inline constexpr int64_t kCacheScaleBytes = 4;
inline int64_t cache_row_bytes(DType dtype, int64_t width) {
  return width * size_bytes(dtype) + (dtype == DType::kF8E4M3 ? kCacheScaleBytes : 0);
}
// The keys or the values of a cache, [N, K, P, width] over N * K * P * cache_row_bytes.
inline Tensor cache_part(void* data, DType dtype, int64_t num_blocks, int64_t num_heads,
                         int64_t block_size, int64_t width) {
  Tensor part(data, dtype, {num_blocks, num_heads, block_size, width});
  part.strides[1] = block_size * cache_row_bytes(dtype, width) / size_bytes(dtype);
  part.strides[0] = num_heads * part.strides[1];
  return part;
}
// A cache in f8 as bytes [N, K, P, width + 4], which is how arrays bring it; others as they are.
inline Tensor cache_part_of(const Tensor& array) {
  const auto& [num_blocks, num_heads, block_size, row_bytes] = array.shape;
  if (array.dtype != DType::kU8 || array.rank != 4 || !array.is_contiguous() ||
      row_bytes < kCacheScaleBytes)
    return array;
  return cache_part(array.data, DType::kF8E4M3, num_blocks, num_heads, block_size,
                    row_bytes - kCacheScaleBytes);
}
inline int64_t cache_block_bytes(const Tensor& part) {
  return part.strides[0] * size_bytes(part.dtype);
}
// Where a row's scale is, in bytes from the start of a part in f8.
inline int64_t cache_scale_offset(const Tensor& part, int64_t block, int64_t head, int64_t offset) {
  return block * part.strides[0] + head * part.strides[1] + part.shape[2] * part.shape[3] +
         offset * kCacheScaleBytes;
}

// One layer's paged cache: a token's slot is block_id * P + offset.
struct PagedKvCache {
  Tensor keys;    // [N, K, P, D] f32, bf16 or f8, as cache_part lays it out
  Tensor values;  // [N, K, P, Dv] the same dtype; or keys.slice(3, 0, Dv)
  KeyLayout key_layout = KeyLayout::kRows;

  // A value is the first Dv elements of the key's row, in f8 with its scale, and is not kept by
  // itself: multi-head latent attention, DeepSeek-AI 2024, section 2.1. Keys lie in rows then.
  bool has_values_in_keys() const { return keys.data != nullptr && values.data == keys.data; }

  // Where element d of a key is, from the start of keys.
  int64_t key_index(int64_t block, int64_t head, int64_t offset, int64_t d) const {
    const int64_t head_dim = keys.shape[3];
    const int64_t start = block * keys.strides[0] + head * keys.strides[1];
    if (key_layout == KeyLayout::kRows) return start + offset * head_dim + d;
    const int64_t panel = start + offset / kKeyPanelTokens * kKeyPanelTokens * head_dim;
    const int64_t column = offset % kKeyPanelTokens;
    const int64_t run = key_run();
    return panel + (d / run * kKeyPanelTokens + column) * run + d % run;
  }
  // Consecutive elements of a key that lie side by side: 4 bytes of a panel.
  int64_t key_run() const {
    return key_layout == KeyLayout::kRows ? keys.shape[3] : 4 / size_bytes(keys.dtype);
  }
};

// Writes the step's keys and values to their slots, rounding to the cache's dtype (nearest even);
// in f8, a row is divided by its scale first, the least power of two, from 2^-126 on, by which its
// largest element comes to at most 448, and a row with infinity or NaN is NaN as a whole.
struct StoreKvArgs {
  ConstTensor keys;                // [T, K, D]; tokens may be strided
  ConstTensor values;              // [T, K, Dv]; tokens may be strided; none: values in the keys
  std::span<const int64_t> slots;  // [T], each in [0, N * P), all different; -1 skips the token
  PagedKvCache cache;
};

// Copies whole blocks in the given order: pairs (source, destination).
struct CopyBlocksArgs {
  std::span<const std::pair<int32_t, int32_t>> pairs;
  PagedKvCache cache;
};

// Copies whole blocks between a cache and one in host memory: pairs (source, destination), whose
// order does not matter.
struct TransferBlocksArgs {
  std::span<const std::pair<int32_t, int32_t>> pairs;
  PagedKvCache device;  // in the backend's memory
  PagedKvCache host;    // [N', K, P, D] of the same K, P, D, dtype and layout, in host memory
  bool to_host = false;
};

// out[t, h] = sum_j softmax_j(scale * q[t, h] . k_j) v_j over the positions that the token sees: j
// <= its own position and, with a window w > 0, j > own position - w. Query head h reads KV head h
// / (H / K). Token i of sequence b has position kv_lens[b] - (query_starts[b+1] - query_starts[b])
// + i (bottom-right causal); its own key is in the cache.
//
// The KV is walked in tiles of kKvTile positions anchored at position 0, whatever P is. A tile
// gives a maximum m, a sum l and an unnormalised output o of its own; the tiles of a span of
// kKvSpan positions merge in position order, then the spans. Hence the same bits for prefill, chunk
// and decode, and whether or not the spans are shared among threads. Flash attention: Dao et al.
// 2022, section 3.1. A sink s of a head is one more score, of nothing, that is not scaled: once all
// spans are merged, with n = max(m, s), out = (o * f) / (l * f + exp(s - n)), f = exp(m - n).
// OpenAI 2025 (gpt-oss). Over a cache in bf16 or f8, instruction sets with products of bf16 round q
// and the weights to bf16, and l sums what is used (docs/decisions/bf16-products-on-the-cpu.md). In
// f8, host backends multiply codes: a key's scale multiplies its score, as scale * (scale of the
// row), and a value's its weight, after l has it. Powers of two change no bit of that unless
// something gets out of the range of normal numbers (docs/decisions/fp8-kv-cache.md). 64: four
// panels of 16 keys, as many as a product of few rows takes at once; the scores of a row tile stay
// in the L1. 512: a context of 4,096 has a span for each of 8 threads, and to merge one, a
// multiply-add an output, is a thousandth of its products.
inline constexpr int64_t kKvTile = 64;
inline constexpr int64_t kKvSpan = 512;
class AttentionRanks;  // kernels/attention_ranks.h
struct PagedAttentionArgs {
  ConstTensor q;  // [T, H, D]; tokens may be strided
  PagedKvCache cache;
  std::span<const int32_t> query_starts;  // [B + 1], from 0 to T, increasing
  std::span<const int32_t> kv_lens;       // [B], the step's tokens included
  std::span<const int32_t> block_tables;  // [B, M] row-major
  int64_t max_blocks = 0;                 // M
  float scale = 1.0f;
  int32_t window = 0;     // 0: unlimited
  float soft_cap = 0.0f;  // c > 0: scores become c * tanh(score / c)
  ConstTensor sinks;      // [H] f32, or none
  Tensor out;             // [T, H, Dv]; tokens may be strided
  // Those that keep the cache together, and have stored the step's keys and values by the time that
  // they all have called the op; null: there is one. K is 1 then. Host backends alone.
  AttentionRanks* ranks = nullptr;
};

// What there is to say of an activation, in the order of Activation.
struct ActivationRow {
  std::string_view name;
  std::string_view spellings;  // what config.json calls it, separated by spaces
  bool is_gated = false;       // of a gate and what it is multiplied with: gated_activation alone
};
inline constexpr ActivationRow kActivations[] = {
#define LLMSERVE_ACTIVATION(enumerator, name, spellings) {#name, spellings},
#define LLMSERVE_GATED_ACTIVATION(enumerator, name, spellings) {#name, spellings, true},
#include "kernels/activations.inc"
};
constexpr std::string_view name(Activation activation) {
  return kActivations[static_cast<size_t>(activation)].name;
}

// Of RouterScore, in its order.
inline constexpr std::string_view kRouterScores[] = {"softmax", "sigmoid", "softmax_of_chosen",
                                                     "sigmoid_of_chosen", "sparsemixer"};

// out[t] = activation(gate_up[t, :F]) * gate_up[t, F:], or what an activation of both makes of
// them. Shazeer 2020, eq. 5.
struct GatedActivationArgs {
  ConstTensor gate_up;  // [T, 2F]
  Tensor out;           // [T, F]
  Activation activation = Activation::kSilu;
};

// A linear layer and its neighbours, one after another: the norm of what it reads, the layer, the
// gated activation of what it writes. The bits are those of the three ops; what lies between them
// (norm->out and, with a gate, linear.out) is working memory that holds anything afterwards, so
// that a backend may keep it in registers. With a gate, the first F rows of the weight make the
// gate and the other F what it is multiplied with.
struct FusedLinearArgs {
  std::optional<RmsNormArgs> norm;          // of [M, K]; its out is linear.x and not its x
  LinearArgs linear;                        // with a gate, not accumulating
  std::optional<GatedActivationArgs> gate;  // its gate_up is linear.out
};

// A gated feed-forward layer: a linear layer with a gate, and the one that reads what that writes.
// The bits are those of the two ops; up's gate->out is working memory, too.
struct FusedMlpArgs {
  FusedLinearArgs up;  // with a gate
  LinearArgs down;     // its x is up.gate->out
};

// A gated feed-forward layer of experts: products with a gate, those that read what that writes,
// and the sums of what they give. The bits are those of the four ops; what lies between them
// (up.out, gate.out, down.out) is working memory that holds anything afterwards. A row of an id
// below 0 has weight 0.
struct FusedExpertsArgs {
  GroupedLinearArgs up;        // the first F rows of a weight make the gate
  GatedActivationArgs gate;    // its gate_up is up.out
  GroupedLinearArgs down;      // its x is gate.out, a row for each of the same ids
  CombineExpertsArgs combine;  // its x is down.out
};

// What stands between a step's queries, keys and values and attention: rms_norm of every head of q
// and k, where there are weights, then rotary, where there are angles, both in place, then
// store_kv. The bits are those of these ops; k holds anything afterwards.
struct PrepareQkvArgs {
  Tensor q;            // [T, H, D]; tokens may be strided, heads are not
  Tensor k;            // [T, K, D]; likewise
  ConstTensor v;       // [T, K, Dv]; tokens may be strided
  ConstTensor q_norm;  // [D] f32, or none
  ConstTensor k_norm;  // [D] f32, or none
  NormNumbers numbers;
  ConstTensor q_cos_sin;  // [T, d], or none
  ConstTensor k_cos_sin;  // [T, d], or none
  bool interleaved = false;
  std::span<const int64_t> slots;  // [T], as in StoreKvArgs
  PagedKvCache cache;
};

// What stands before attention, attention, and the linear layer that reads its output, all heads of
// a token side by side. The bits are those of the ops, one after another; prepare.q, where it is
// given, and attention.out are working memory that holds anything afterwards.
struct FusedAttentionArgs {
  // Of attention's q and cache, or none. A token's slot is that of its position in the sequence,
  // or -1.
  std::optional<PrepareQkvArgs> prepare;
  PagedAttentionArgs attention;  // its out is contiguous
  LinearArgs output;             // its x [T, H * Dv] is attention.out
};

// out[t] = activation(x[t]), of an activation of one number.
struct ActivationArgs {
  ConstTensor x;  // [T, F]
  Tensor out;     // [T, F]; may be x itself
  Activation activation = Activation::kSilu;
};

// Logits in place: x = scale * x, then, with a cap c > 0, x = c * tanh(x / c). Gemma Team 2024,
// section 2.
struct CapLogitsArgs {
  Tensor logits;  // [S, V]
  float scale = 1.0f;
  float soft_cap = 0.0f;  // 0: none
};

// out[s] = x[rows[s]].
struct GatherRowsArgs {
  ConstTensor x;                  // [T, E]
  std::span<const int32_t> rows;  // [S], each in [0, T)
  Tensor out;                     // [S, E]
};

struct TokenBias {
  int32_t token_id = 0;
  float bias = 0;
};

// A token that the sequence has already.
struct TokenCount {
  int32_t token_id = 0;
  int32_t num_generated = 0;  // times in the output
  bool is_in_prompt = false;
};

// How one row's token is drawn. Ids are in [0, V) unless said otherwise, and each list names an id
// once.
struct SampleRow {
  DrawSettings draw;
  uint64_t seed = 0;
  int64_t position = 0;  // of the token to be drawn

  // Edits of the draw's copy of the row, in this order; the logprobs are of the raw logits.
  ConstTensor draw_logits;  // [V] f32 in host memory: drawn from in place of the row; or none
  std::span<const TokenBias> biases;          // added
  std::span<const uint32_t> allowed;          // [ceil(V / 32)]: token i may be drawn if bit i % 32
                                              // of word i / 32 is set; empty: all
  std::span<const int32_t> banned_token_ids;  // not to be drawn; ids outside [0, V) are ignored
  std::span<const TokenCount> counts;         // what the penalties are of
  int32_t forced_token_id = -1;               // >= 0: the token, whatever all else says

  int32_t num_top = -1;  // most likely tokens to report; -1: no logprobs at all
  std::span<const int32_t> reported_token_ids;  // reported as well, if num_top >= 0
};

struct TopToken {
  int32_t token_id = 0;
  float logprob = 0;
  int32_t rank = 0;
};

struct SampledRow {
  int32_t token_id = 0;
  float logprob = 0;          // x_i - logsumexp(x) of the raw logits; set when num_top >= 0
  int32_t rank = 0;           // 1 + the number of tokens with a larger logit; likewise
  bool is_valid = true;       // false if a logit, raw or edited, is NaN or +inf, or none is finite
  bool is_raw_valid = true;   // the same of the raw logits alone
  std::vector<TopToken> top;  // [min(num_top, V)] best first, ties to the lowest id
  std::vector<TopToken> reported;  // [reported_token_ids] likewise
};

// Draws one token a row, from a copy x of its logits that is edited first: x = draw_logits, where
// given; x_i += bias; x_i = -inf where not allowed or banned; then the penalties, of `counts`. What
// these and the filters do to x, DrawSettings says. The token is the argmax over the kept of z_i +
// g_i, ties to the lowest id, with Gumbel noise g_i = -log(-log(u)), u from (seed, position, token
// id): core/math/noise.inc. A row whose x are all -inf is not valid. Gumbel-max: Maddison et al.
// 2014; counter-based noise: Salmon et al. 2011 (Philox).
struct SampleArgs {
  ConstTensor logits;               // [S, V]
  std::span<const SampleRow> rows;  // [S]
  std::span<SampledRow> out;        // [S]
};

// Each throws InvalidArgument, naming op and field, unless shapes, dtypes and index ranges are as
// written above. Cheap enough for every call: all indices are checked but the entries of
// block_tables, which are the caller's invariant.
#define LLMSERVE_OP(name, Args) void validate(const Args& args);
#include "kernels/op_list.inc"
void validate(const TransferBlocksArgs& args);

}  // namespace llmserve
