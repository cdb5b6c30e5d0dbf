// Embedding, rotary embedding, activations, sums, gather, conversions. Offsets are int64
// throughout.
#include "kernels/cuda/fours.cuh"
#include "kernels/cuda/rows/rotate.cuh"

namespace llmserve::cuda {
namespace {

constexpr int kThreads = 256;

// A block takes a part of a row: 128 threads, two fours of neighbours each, which are asked for
// together.
constexpr int kPartThreads = 128;
constexpr int kFoursEach = 2;
constexpr int kPart = 4 * kFoursEach * kPartThreads;

// blockIdx.x: row. blockIdx.y: part.
dim3 parts_of(int64_t num_rows, int64_t width) {
  return dim3(static_cast<unsigned>(num_rows), static_cast<unsigned>(ceil_div(width, kPart)));
}
// Where the thread's four h begins in its row; maybe beyond the end.
__device__ __forceinline__ int64_t four_begin(int h) {
  return static_cast<int64_t>(blockIdx.y) * kPart + 4 * (h * kPartThreads + threadIdx.x);
}
template <bool kIsAligned>
__device__ __forceinline__ void load_part(const float* row, int64_t width, Four (&x)[kFoursEach]) {
#pragma unroll
  for (int h = 0; h < kFoursEach; ++h) x[h] = load_four<kIsAligned>(row, four_begin(h), width);
}
template <bool kIsAligned, class Element>
__device__ __forceinline__ void store_part(Element* row, int64_t width,
                                           const Four (&x)[kFoursEach]) {
#pragma unroll
  for (int h = 0; h < kFoursEach; ++h) store_four<kIsAligned>(row, four_begin(h), width, x[h]);
}

// blockIdx.x: token, in [0, T). A thread takes its part's elements threadIdx.x, threadIdx.x +
// kPartThreads, ….
template <Storage kStorage>
__global__ void __launch_bounds__(kPartThreads)
    embedding_kernel(const void* table, int64_t table_stride, const int32_t* token_ids,
                     int64_t width, float scale, Rows out) {
  wait_for_previous();
  const int64_t from = token_ids[blockIdx.x] * table_stride;
  float* to = out.data + static_cast<int64_t>(blockIdx.x) * out.stride;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * kPart + threadIdx.x;
  float x[kPart / kPartThreads] = {};
#pragma unroll
  for (int j = 0; j < kPart / kPartThreads; ++j) {
    const int64_t i = begin + j * kPartThreads;
    if (i < width) x[j] = load<kStorage>(table, from + i);
  }
#pragma unroll
  for (int j = 0; j < kPart / kPartThreads; ++j) {
    const int64_t i = begin + j * kPartThreads;
    if (i < width) to[i] = x[j] * scale;
  }
}

// blockIdx.x: token. Threads stride over the pairs.
__global__ void rotary_table_kernel(const int32_t* positions, const float* inv_freq, int64_t half,
                                    RotaryScale scale, Rows cos_sin) {
  wait_for_previous();
  const int32_t position = positions[blockIdx.x];
  float* row = cos_sin.data + static_cast<int64_t>(blockIdx.x) * cos_sin.stride;
  double growth = 0;
  if (scale.growth != 0)
    growth =
        static_cast<double>(scale.growth) * log1p(static_cast<double>(position / scale.period));
  const float factor = scale.factor * static_cast<float>(1.0 + growth);
  for (int64_t i = threadIdx.x; i < half; i += blockDim.x) {
    const float angle = static_cast<float>(position) * inv_freq[i];
    double sine;
    double cosine;
    sincos(static_cast<double>(angle), &sine, &cosine);
    row[i] = static_cast<float>(cosine) * factor;
    row[half + i] = static_cast<float>(sine) * factor;
  }
}

// blockIdx.x: token. Threads stride over the pairs of all heads, e in [0, H * half): head e / half,
// pair e % half. Each pair has one thread, so that it is rotated in place, or where it has been
// copied to; what is not rotated is copied alone.
__global__ void rotary_kernel(RotaryParams p, unsigned num_pairs) {
  wait_for_previous();
  const int64_t token = blockIdx.x;
  const auto half = static_cast<unsigned>(p.half);
  const float* angles = p.cos_sin.data + token * p.cos_sin.stride;
  for (unsigned e = threadIdx.x; e < num_pairs; e += blockDim.x) {
    const int64_t head = e / half;
    const int64_t pair = e % half;
    float* x = p.heads + token * p.token_stride + head * p.head_stride;
    if (p.out) {
      const float* from = x;
      x = p.out + token * p.out_token_stride + head * p.out_head_stride;
      const int64_t a = p.interleaved ? 2 * pair : pair;
      const int64_t b = p.interleaved ? a + 1 : pair + p.half;
      x[a] = from[a];
      x[b] = from[b];
    }
    rotate_pair(x, angles, pair, p.half, p.interleaved);
  }
  if (!p.out) return;
  const int64_t kept = p.width - 2 * p.half;
  for (int64_t e = threadIdx.x; e < p.num_heads * kept; e += blockDim.x) {
    const int64_t i = 2 * p.half + e % kept;
    p.out[token * p.out_token_stride + e / kept * p.out_head_stride + i] =
        p.heads[token * p.token_stride + e / kept * p.head_stride + i];
  }
}

// Each element has one thread, so that out may be x.
template <Activation kKind, bool kIsGated, bool kIsAligned>
__global__ void __launch_bounds__(kPartThreads)
    activation_kernel(ConstRows x, int64_t width, Rows out) {
  wait_for_previous();
  const float* from = x.data + static_cast<int64_t>(blockIdx.x) * x.stride;
  Four value[kFoursEach];
  Four up[kFoursEach];
  load_part<kIsAligned>(from, width, value);
  if constexpr (kIsGated) load_part<kIsAligned>(from + width, width, up);
#pragma unroll
  for (int h = 0; h < kFoursEach; ++h) {
    if (four_begin(h) >= width) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (kIsGated)
        value[h].at[j] = v_gate(kKind, value[h].at[j], up[h].at[j]);
      else
        value[h].at[j] = v_activate(kKind, value[h].at[j]);
    }
  }
  store_part<kIsAligned>(out.data + static_cast<int64_t>(blockIdx.x) * out.stride, width, value);
}

template <bool kIsAligned>
__global__ void __launch_bounds__(kPartThreads)
    add_kernel(Rows out, ConstRows x, int64_t width, float scale) {
  wait_for_previous();
  float* to = out.data + static_cast<int64_t>(blockIdx.x) * out.stride;
  Four sum[kFoursEach];
  Four added[kFoursEach];
  load_part<kIsAligned>(to, width, sum);
  load_part<kIsAligned>(x.data + static_cast<int64_t>(blockIdx.x) * x.stride, width, added);
#pragma unroll
  for (int h = 0; h < kFoursEach; ++h) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[h].at[j] += added[h].at[j] * scale;
  }
  store_part<kIsAligned>(to, width, sum);
}

template <bool kIsAligned>
__global__ void __launch_bounds__(kPartThreads)
    cap_logits_kernel(Rows logits, int64_t width, float scale, float cap) {
  wait_for_previous();
  float* row = logits.data + static_cast<int64_t>(blockIdx.x) * logits.stride;
  Four x[kFoursEach];
  load_part<kIsAligned>(row, width, x);
#pragma unroll
  for (int h = 0; h < kFoursEach; ++h) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[h].at[j] *= scale;
      if (cap > 0) x[h].at[j] = cap * v_tanh(x[h].at[j] / cap);
    }
  }
  store_part<kIsAligned>(row, width, x);
}

template <Activation kKind>
auto activation_of(bool is_gated, bool is_aligned) {
  if (is_gated)
    return is_aligned ? activation_kernel<kKind, true, true>
                      : activation_kernel<kKind, true, false>;
  return is_aligned ? activation_kernel<kKind, false, true>
                    : activation_kernel<kKind, false, false>;
}

auto activation_of(Activation kind, bool is_gated, bool is_aligned) {
  switch (kind) {
#define LLMSERVE_ACTIVATION(enumerator, name, spellings) \
  case Activation::enumerator:                           \
    return activation_of<Activation::enumerator>(is_gated, is_aligned);
#include "kernels/activations.inc"
  }
  return activation_of<Activation::kSilu>(is_gated, is_aligned);
}

// blockIdx.x: row of out.
template <bool kIsAligned>
__global__ void __launch_bounds__(kPartThreads)
    gather_rows_kernel(ConstRows x, const int32_t* rows, int64_t width, Rows out) {
  wait_for_previous();
  Four row[kFoursEach];
  load_part<kIsAligned>(x.data + rows[blockIdx.x] * x.stride, width, row);
  store_part<kIsAligned>(out.data + static_cast<int64_t>(blockIdx.x) * out.stride, width, row);
}

// blockIdx.x: row of x.
template <bool kIsAligned>
__global__ void __launch_bounds__(kPartThreads)
    round_to_bf16_kernel(ConstRows x, int64_t width, uint16_t* to) {
  wait_for_previous();
  const int64_t row = blockIdx.x;
  Four four[kFoursEach];
  load_part<kIsAligned>(x.data + row * x.stride, width, four);
  store_part<kIsAligned>(to + row * width, width, four);
}

template <Storage kFrom, Storage kTo>
__global__ void convert_kernel(const void* from, int64_t n, void* to) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; e < n; e += stride)
    store<kTo>(to, e, load<kFrom>(from, e));
}

template <Storage kFrom>
void convert_from(const void* from, int64_t n, void* to, Storage to_storage, cudaStream_t stream) {
  const dim3 grid = blocks(elementwise_blocks(n, kThreads));
  if (to_storage == Storage::kF32)
    launch("convert", convert_kernel<kFrom, Storage::kF32>, grid, kThreads, 0, stream, from, n, to);
  else
    launch("convert", convert_kernel<kFrom, Storage::kBF16>, grid, kThreads, 0, stream, from, n,
           to);
}

}  // namespace

void embedding(const void* table, Storage storage, int64_t table_stride, const int32_t* token_ids,
               int64_t num_tokens, int64_t width, float scale, Rows out, cudaStream_t stream) {
  if (num_tokens == 0 || width == 0) return;
  const auto kernel = storage == Storage::kF32    ? embedding_kernel<Storage::kF32>
                      : storage == Storage::kBF16 ? embedding_kernel<Storage::kBF16>
                                                  : embedding_kernel<Storage::kF16>;
  launch_early("embedding", kernel, parts_of(num_tokens, width), kPartThreads, 0, stream, table,
               table_stride, token_ids, width, scale, out);
}

void rotary_table(const int32_t* positions, int64_t num_tokens, const float* inv_freq, int64_t half,
                  const RotaryScale& scale, Rows cos_sin, cudaStream_t stream) {
  if (num_tokens == 0 || half == 0) return;
  launch_early("rotary_table", rotary_table_kernel, blocks(num_tokens), row_threads(half), 0,
               stream, positions, inv_freq, half, scale, cos_sin);
}

void rotary(const RotaryParams& p, cudaStream_t stream) {
  const int64_t pairs = p.num_heads * p.half;
  if (p.num_tokens == 0 || (pairs == 0 && !p.out)) return;
  launch_early("rotary", rotary_kernel, blocks(p.num_tokens), row_threads(pairs), 0, stream, p,
               static_cast<unsigned>(pairs));
}

void activation(ConstRows x, int64_t num_rows, int64_t width, Activation kind, bool is_gated,
                Rows out, cudaStream_t stream) {
  if (num_rows == 0 || width == 0) return;
  const bool aligned = width % 4 == 0 && is_aligned(x) && is_aligned(out);
  launch_early("activation", activation_of(kind, is_gated, aligned), parts_of(num_rows, width),
               kPartThreads, 0, stream, x, width, out);
}

void add(Rows out, ConstRows x, int64_t num_rows, int64_t width, float scale, cudaStream_t stream) {
  if (num_rows == 0 || width == 0) return;
  const bool aligned = width % 4 == 0 && is_aligned(x) && is_aligned(out);
  launch_early("add", aligned ? add_kernel<true> : add_kernel<false>, parts_of(num_rows, width),
               kPartThreads, 0, stream, out, x, width, scale);
}

void cap_logits(Rows logits, int64_t num_rows, int64_t width, float scale, float soft_cap,
                cudaStream_t stream) {
  if (num_rows == 0 || width == 0) return;
  const bool aligned = width % 4 == 0 && is_aligned(logits);
  launch_early("cap_logits", aligned ? cap_logits_kernel<true> : cap_logits_kernel<false>,
               parts_of(num_rows, width), kPartThreads, 0, stream, logits, width, scale, soft_cap);
}

void gather_rows(ConstRows x, const int32_t* rows, int64_t num_rows, int64_t width, Rows out,
                 cudaStream_t stream) {
  if (num_rows == 0 || width == 0) return;
  const bool aligned = width % 4 == 0 && is_aligned(x) && is_aligned(out);
  launch_early("gather_rows", aligned ? gather_rows_kernel<true> : gather_rows_kernel<false>,
               parts_of(num_rows, width), kPartThreads, 0, stream, x, rows, width, out);
}

void round_to_bf16(ConstRows x, int64_t num_rows, int64_t width, uint16_t* to,
                   cudaStream_t stream) {
  if (num_rows == 0 || width == 0) return;
  const bool aligned = width % 4 == 0 && is_aligned(x) && is_aligned(to, 0);
  launch_early("round_to_bf16", aligned ? round_to_bf16_kernel<true> : round_to_bf16_kernel<false>,
               parts_of(num_rows, width), kPartThreads, 0, stream, x, width, to);
}

void convert(const void* from, Storage from_storage, int64_t n, void* to, Storage to_storage,
             cudaStream_t stream) {
  if (n == 0) return;
  if (from_storage == Storage::kF32)
    convert_from<Storage::kF32>(from, n, to, to_storage, stream);
  else if (from_storage == Storage::kBF16)
    convert_from<Storage::kBF16>(from, n, to, to_storage, stream);
  else
    convert_from<Storage::kF16>(from, n, to, to_storage, stream);
}

}  // namespace llmserve::cuda
