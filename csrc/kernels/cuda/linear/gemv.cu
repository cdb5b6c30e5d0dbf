// The product of a few rows with a weight, M <= 8: one reading of the weight, which is what such a
// product costs. A warp makes kColumns outputs of every row; on the way, x may be normed and gates
// be applied.
#include "kernels/cuda/rows/rms.cuh"

namespace llmserve::cuda {
namespace {

constexpr int kChunk = 8;           // neighbours along K that a lane takes: 16 bytes of bf16
constexpr int kStep = 32 * kChunk;  // elements of K that a warp takes at once

// A slab of K: what a lane holds of the weight while x is brought to shared memory. Registers: 4
// chunks of 16 bytes a column in bf16, 2 of 32 in f32.
template <Storage kStorage>
constexpr int kChunksEach = kStorage == Storage::kF32 ? 2 : 4;
template <Storage kStorage>
constexpr int kSlab = kChunksEach<kStorage> * kStep;

// Where element k of a slab of n lies in shared memory: the first and the last four of a chunk
// apart, so that the lanes' 16-byte reads do not collide.
__device__ __forceinline__ int slab_index(int k, int n) {
  return k % kChunk / 4 * (n / 2) + k / kChunk * 4 + k % 4;
}

// Eight neighbouring weights as they are stored.
template <Storage kStorage>
struct Chunk {
  uint4 bits[kStorage == Storage::kF32 ? 2 : 1];

  __device__ __forceinline__ float operator[](int j) const {
    if constexpr (kStorage == Storage::kF32) {
      const uint4& four = bits[j / 4];
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
      return __uint_as_float(words[j % 4]);
    } else {
      const uint32_t words[4] = {bits[0].x, bits[0].y, bits[0].z, bits[0].w};
      const uint32_t word = words[j / 2];
      return __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
  }
};

// The weights k … k + 7 of a row that begins at element `row`; 0 beyond the row's end.
template <Storage kStorage, bool kIsAligned>
__device__ __forceinline__ Chunk<kStorage> load_chunk(const LinearParams& p, int64_t row,
                                                      int64_t k) {
  Chunk<kStorage> chunk{};
  if constexpr (kIsAligned) {  // K is a multiple of 8: a chunk is whole or beyond the end
    static_assert(kStorage == Storage::kF32, "aligned bf16 is mma_gemv's");
    if (k < p.in_features) {
      const auto* from =
          reinterpret_cast<const uint4*>(static_cast<const float*>(p.weight) + row + k);
      chunk.bits[0] = __ldcs(from);  // read once
      chunk.bits[1] = __ldcs(from + 1);
    }
  } else {
    uint32_t words[kStorage == Storage::kF32 ? 8 : 4] = {};
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      if (k + j >= p.in_features) continue;
      const uint32_t bits = __float_as_uint(load<kStorage>(p.weight, row + k + j));
      if constexpr (kStorage == Storage::kF32)
        words[j] = bits;
      else
        words[j / 2] |= j % 2 == 0 ? bits >> 16 : bits;
    }
#pragma unroll
    for (int i = 0; i < (kStorage == Storage::kF32 ? 2 : 1); ++i)
      chunk.bits[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
  }
  return chunk;
}

// The rows' factors of the norm, by the warps of the block in turn, each doing what
// some warps of the norm's own block do. Ends with a barrier.
template <int kRows>
__device__ __forceinline__ void norm_rows(const LinearParams& p, const LinearFusion& f,
                                          float (&partial)[kRows][32], float (&factor)[kRows]) {
  const int num_warps = f.norm_threads / 32;
  const int warp = threadIdx.x / 32;
  for (int r = 0; r < kRows && r < p.num_rows; ++r) {
    for (int w = warp; w < num_warps; w += kGemvWarps) {
      const float sum = warp_squares(p.x.data + r * p.x.stride, p.in_features, f.norm_threads, w);
      if (threadIdx.x % 32 == 0) partial[r][w] = sum;
    }
  }
  __syncthreads();
  for (int r = warp; r < kRows && r < p.num_rows; r += kGemvWarps) {
    const float sum = sum_of_warps(partial[r][threadIdx.x % 32], num_warps);
    if (threadIdx.x % 32 == 0) factor[r] = rms_factor(sum, p.in_features, f.norm);
  }
  __syncthreads();
}

// The column that the warp's accumulator c is of: neighbours, or, gated, first / 2 + c / 2 of the
// gate (c even) and of what it is multiplied with. Beyond the last one: that again, not written.
__device__ __forceinline__ int64_t column_of(const LinearParams& p, const LinearFusion& f,
                                             int64_t first, int c) {
  const int64_t half = p.out_features / 2;
  if (!f.is_gated) return first + c < p.out_features ? first + c : p.out_features - 1;
  const int64_t gate = (first + c) / 2 < half ? (first + c) / 2 : half - 1;
  return c % 2 == 0 ? gate : half + gate;
}

// Column first + c of warp w of block b, first = (b * kGemvWarps + w) * kColumns. Lane l sums the
// chunks l, l + 32, … of K, each in order; the lanes' sums meet in a butterfly. Neither depends on
// M or on kColumns, so that a row has the same bits in any company. Rows in [M, kRows) are zeros.
template <Storage kStorage, int kRows, int kColumns, bool kIsAligned>
__global__ void __launch_bounds__(kGemvThreads) gemv_kernel(LinearParams p, LinearFusion f) {
  constexpr int kN = kSlab<kStorage>;
  __shared__ __align__(16) float slab[kRows][kN];  // at most 32 KiB
  __shared__ float partial[kRows][32];
  __shared__ float factor[kRows];
  const int lane = threadIdx.x % 32;
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kGemvWarps + threadIdx.x / 32) * kColumns;
  int64_t row_starts[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) row_starts[c] = column_of(p, f, first, c) * p.in_features;
  float sums[kRows][kColumns] = {};

  wait_for_previous();
  for (int64_t k0 = 0; k0 < p.in_features; k0 += kN) {
    Chunk<kStorage> w[kChunksEach<kStorage>][kColumns];  // asked for before the barrier
#pragma unroll
    for (int i = 0; i < kChunksEach<kStorage>; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        w[i][c] =
            load_chunk<kStorage, kIsAligned>(p, row_starts[c], k0 + i * kStep + lane * kChunk);
      }
    }
    if (k0 == 0 && f.norm_weight) norm_rows<kRows>(p, f, partial, factor);
    __syncthreads();  // the last slab has been read
    for (int e = threadIdx.x; e < kRows * kN; e += kGemvThreads) {
      const int64_t row = e / kN;
      const int64_t k = k0 + e % kN;
      float value = 0.0f;
      if (row < p.num_rows && k < p.in_features) {
        value = p.x.data[row * p.x.stride + k];
        if (f.norm_weight) value = v_normed(value, factor[row], f.norm_weight[k], f.norm);
      }
      if constexpr (kStorage == Storage::kBF16) value = bf16_to_float(float_to_bf16(value));
      slab[row][slab_index(e % kN, kN)] = value;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kChunksEach<kStorage>; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int at = (i * 32 + lane) * 4;
        const float4 low = *reinterpret_cast<const float4*>(&slab[r][at]);
        const float4 high = *reinterpret_cast<const float4*>(&slab[r][kN / 2 + at]);
        const float x[kChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) sums[r][c] = v_fma(x[j], w[i][c][j], sums[r][c]);
        }
      }
    }
  }

  // Every lane gets every sum; lane r * kColumns + c writes one.
  static_assert(kRows * kColumns <= 32);
  float value = 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float sum = warp_sum(sums[r][c]);
      if (lane == r * kColumns + c) value = sum;
    }
  }
  const int row = lane / kColumns;
  const int64_t column = column_of(p, f, first, lane % kColumns);
  if (p.bias) value += p.bias[column];
  bool is_mine = row < p.num_rows && row < kRows && first + lane % kColumns < p.out_features;
  if (f.is_gated) {
    const float up = __shfl_xor_sync(kAllLanes, value, 1);
    value = v_gate(f.activation, value, up);
    is_mine = is_mine && lane % 2 == 0;
  }
  if (!is_mine) return;
  float& out = p.out.data[row * p.out.stride + column];
  out = p.accumulate ? value + out : value;
}

template <Storage kStorage, int kRows>
void launch_rows(const LinearParams& p, const LinearFusion& f, cudaStream_t stream) {
  // Few shapes are not aligned, and none that is fast: one kernel for all of them. Aligned bf16 is
  // left to it, too, where mma_gemv.cu cannot do it.
  auto kernel = gemv_kernel<kStorage, kRows, 2, false>;
  int columns = 2;
  if constexpr (kStorage == Storage::kF32) {
    if (p.in_features % kChunk == 0 && is_aligned(p.weight)) {
      columns = gemv_columns(p.out_features);
      kernel = columns == 2 ? gemv_kernel<kStorage, kRows, 2, true>
                            : gemv_kernel<kStorage, kRows, 4, true>;
    }
  }
  launch_early("linear", kernel, blocks(gemv_blocks(p.out_features, columns)), kGemvThreads, 0,
               stream, p, f);
}

template <Storage kStorage>
void launch_storage(const LinearParams& p, const LinearFusion& f, cudaStream_t stream) {
  switch (gemv_rows(p.num_rows)) {
    case 1:
      return launch_rows<kStorage, 1>(p, f, stream);
    case 2:
      return launch_rows<kStorage, 2>(p, f, stream);
    case 4:
      return launch_rows<kStorage, 4>(p, f, stream);
    default:
      return launch_rows<kStorage, 8>(p, f, stream);
  }
}

}  // namespace

void gemv(const LinearParams& params, const LinearFusion& fusion, cudaStream_t stream) {
  if (params.num_rows == 0 || params.out_features == 0) return;
  if (params.storage == Storage::kF32)
    launch_storage<Storage::kF32>(params, fusion, stream);
  else
    launch_storage<Storage::kBF16>(params, fusion, stream);
}

}  // namespace llmserve::cuda
