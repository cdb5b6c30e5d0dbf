// Embedding, rotary embedding, activations, sums, gather, conversions: one thread an element, or a
// block a row. Offsets are int64 throughout.
#include "kernels/cuda/activate.cuh"
#include "kernels/cuda/launch_math.h"
#include "kernels/cuda/rotate.cuh"

namespace llmserve::cuda {
namespace {

constexpr int kThreads = 256;

// blockIdx.x: token, in [0, T). threadIdx.x strides over the row.
template <Storage kStorage>
__global__ void embedding_kernel(const void* table, int64_t table_stride, const int32_t* token_ids,
                                 int64_t width, float scale, Rows out) {
  const int64_t token = blockIdx.x;
  const int64_t from = token_ids[token] * table_stride;
  float* to = out.data + token * out.stride;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x)
    to[i] = load<kStorage>(table, from + i) * scale;
}

// Element e of [0, T * half): token e / half, pair e % half.
__global__ void rotary_table_kernel(const int32_t* positions, int64_t n, const float* inv_freq,
                                    int64_t half, RotaryScale scale, Rows cos_sin) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; e < n;
       e += stride) {
    const int64_t token = e / half;
    const int64_t i = e % half;
    const float angle = static_cast<float>(positions[token]) * inv_freq[i];
    double sine;
    double cosine;
    sincos(static_cast<double>(angle), &sine, &cosine);
    const double grown = log1p(static_cast<double>(positions[token] / scale.period));
    const float factor =
        scale.factor * static_cast<float>(1.0 + static_cast<double>(scale.growth) * grown);
    float* row = cos_sin.data + token * cos_sin.stride;
    row[i] = static_cast<float>(cosine) * factor;
    row[half + i] = static_cast<float>(sine) * factor;
  }
}

// blockIdx.x: token. Threads stride over the pairs of all heads, e in [0, H * half): head e / half,
// pair e % half. Each pair has one thread, so that it turns in place.
__global__ void rotary_kernel(RotaryParams p) {
  const int64_t token = blockIdx.x;
  const float* angles = p.cos_sin.data + token * p.cos_sin.stride;
  for (int64_t e = threadIdx.x; e < p.num_heads * p.half; e += blockDim.x) {
    float* x = p.heads + token * p.token_stride + (e / p.half) * p.head_stride;
    rotate_pair(x, angles, e % p.half, p.half, p.interleaved);
  }
}

// Element e of [0, T * F): row e / F, column e % F. Each has one thread, so that out may be x.
template <Nonlinearity kKind, bool kIsGated>
__global__ void activation_kernel(ConstRows x, int64_t n, int64_t width, Rows out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; e < n;
       e += stride) {
    const int64_t row = e / width;
    const int64_t i = e % width;
    const float* from = x.data + row * x.stride;
    const float value = activate(kKind, from[i]);
    out.data[row * out.stride + i] = kIsGated ? value * from[width + i] : value;
  }
}

// Element e of [0, R * E): row e / E, column e % E.
__global__ void add_kernel(Rows out, ConstRows x, int64_t n, int64_t width, float scale) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; e < n;
       e += stride) {
    const int64_t row = e / width;
    const int64_t i = e % width;
    out.data[row * out.stride + i] += x.data[row * x.stride + i] * scale;
  }
}

// Element e of [0, S * V): row e / V, column e % V.
__global__ void cap_logits_kernel(Rows logits, int64_t n, int64_t width, float scale, float cap) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; e < n;
       e += stride) {
    float& x = logits.data[e / width * logits.stride + e % width];
    x *= scale;
    if (cap > 0) x = cap * v_tanh(x / cap);
  }
}

template <Nonlinearity kKind>
auto activation_of(bool is_gated) {
  return is_gated ? activation_kernel<kKind, true> : activation_kernel<kKind, false>;
}

// blockIdx.x: row of out.
__global__ void gather_rows_kernel(ConstRows x, const int32_t* rows, int64_t width, Rows out) {
  const float* from = x.data + rows[blockIdx.x] * x.stride;
  float* to = out.data + static_cast<int64_t>(blockIdx.x) * out.stride;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
}

// blockIdx.x: row of x.
__global__ void round_to_bf16_kernel(ConstRows x, int64_t width, uint16_t* to) {
  const int64_t row = blockIdx.x;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x)
    to[row * width + i] = float_to_bf16(x.data[row * x.stride + i]);
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
  launch("embedding", kernel, blocks(num_tokens), row_threads(width), 0, stream, table,
         table_stride, token_ids, width, scale, out);
}

void rotary_table(const int32_t* positions, int64_t num_tokens, const float* inv_freq, int64_t half,
                  const RotaryScale& scale, Rows cos_sin, cudaStream_t stream) {
  const int64_t n = num_tokens * half;
  if (n == 0) return;
  launch("rotary_table", rotary_table_kernel, blocks(elementwise_blocks(n, kThreads)), kThreads, 0,
         stream, positions, n, inv_freq, half, scale, cos_sin);
}

void rotary(const RotaryParams& p, cudaStream_t stream) {
  const int64_t pairs = p.num_heads * p.half;
  if (p.num_tokens == 0 || pairs == 0) return;
  launch("rotary", rotary_kernel, blocks(p.num_tokens), row_threads(pairs), 0, stream, p);
}

void activation(ConstRows x, int64_t num_rows, int64_t width, Nonlinearity kind, bool is_gated,
                Rows out, cudaStream_t stream) {
  const int64_t n = num_rows * width;
  if (n == 0) return;
  const auto kernel = kind == Nonlinearity::kSilu ? activation_of<Nonlinearity::kSilu>(is_gated)
                      : kind == Nonlinearity::kGeluTanh
                          ? activation_of<Nonlinearity::kGeluTanh>(is_gated)
                          : activation_of<Nonlinearity::kGelu>(is_gated);
  launch("activation", kernel, blocks(elementwise_blocks(n, kThreads)), kThreads, 0, stream, x, n,
         width, out);
}

void add(Rows out, ConstRows x, int64_t num_rows, int64_t width, float scale, cudaStream_t stream) {
  const int64_t n = num_rows * width;
  if (n == 0) return;
  launch("add", add_kernel, blocks(elementwise_blocks(n, kThreads)), kThreads, 0, stream, out, x, n,
         width, scale);
}

void cap_logits(Rows logits, int64_t num_rows, int64_t width, float scale, float soft_cap,
                cudaStream_t stream) {
  const int64_t n = num_rows * width;
  if (n == 0) return;
  launch("cap_logits", cap_logits_kernel, blocks(elementwise_blocks(n, kThreads)), kThreads, 0,
         stream, logits, n, width, scale, soft_cap);
}

void gather_rows(ConstRows x, const int32_t* rows, int64_t num_rows, int64_t width, Rows out,
                 cudaStream_t stream) {
  if (num_rows == 0 || width == 0) return;
  launch("gather_rows", gather_rows_kernel, blocks(num_rows), row_threads(width), 0, stream, x,
         rows, width, out);
}

void round_to_bf16(ConstRows x, int64_t num_rows, int64_t width, uint16_t* to,
                   cudaStream_t stream) {
  if (num_rows == 0 || width == 0) return;
  launch("round_to_bf16", round_to_bf16_kernel, blocks(num_rows), row_threads(width), 0, stream, x,
         width, to);
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
