// The product by tensor cores whose bits do not depend on M: bf16 x and weight, float32 sums. Each
// output is one chain of mma.m16n8k16 over K in order; nothing is split along K, whatever the tile.
#include "kernels/cuda/launch_math.h"
#include "kernels/cuda/linear/grouped.h"
#include "kernels/cuda/mma.cuh"

namespace llmserve::cuda {
namespace {

// Host constants' members, as constants that device code may use.
template <int kTile>
struct Tile {
  static constexpr MmaTile kIs = kTile == 0 ? kSmallMma : kTile == 1 ? kMediumMma : kLargeMma;
  static constexpr int kRows = kIs.rows;
  static constexpr int kColumns = kIs.columns;
  static constexpr int kDepth = kIs.depth;
  static constexpr int kStages = kIs.stages;
  static constexpr int kStride = kIs.stride();
  static constexpr int kThreads = kIs.threads();
  static constexpr int kWarpsAcross = kIs.columns / kIs.warp_columns;
  static constexpr int kM = kIs.warp_rows / 16;    // fragments of a warp
  static constexpr int kN = kIs.warp_columns / 8;  // likewise
  static constexpr int kStageElements = (kRows + kColumns) * kStride;
  static constexpr int64_t kSharedBytes = kIs.shared_bytes();
  static_assert(kN % 2 == 0 && kDepth % 16 == 0);
};

// `count` rows from `first` of a row-major bf16 matrix of `num_rows` rows of K, or those that
// `rows` names, the columns [k0, k0 + kDepth) of each; zeros beyond both ends. K is a multiple of
// 8: a chunk is whole or beyond the end.
template <class T>
__device__ __forceinline__ void load_slice(const uint16_t* from, int64_t first, int64_t num_rows,
                                           int count, int64_t k0, int64_t width, uint16_t* to,
                                           const int32_t* rows = nullptr) {
  constexpr int kChunks = T::kDepth / 8;  // of 16 bytes
  for (int e = threadIdx.x; e < count * kChunks; e += T::kThreads) {
    const int row = e / kChunks;
    const int column = e % kChunks * 8;
    const bool is_there = first + row < num_rows && k0 + column < width;
    const int64_t from_row = rows ? rows[row] : first + row;
    const int64_t source = is_there ? from_row * width + k0 + column : 0;
    copy_async(to + row * T::kStride + column, from + source, is_there);
  }
}

// blockIdx: (tile of columns, tile of rows, or the task). Shared memory: kStages times the slice of
// x [kRows, kDepth] and that of the weight [kColumns, kDepth].
template <int kTile, bool kIsGrouped>
__global__ void __launch_bounds__(Tile<kTile>::kThreads)
    mma_kernel(const uint16_t* x, LinearParams p, RowGroups groups) {
  using T = Tile<kTile>;
  LLMSERVE_DYNAMIC_SHARED(uint16_t, shared);
  __shared__ int32_t x_rows[kIsGrouped ? T::kRows : 1];
  wait_for_previous();
  RowTask task{};
  if constexpr (kIsGrouped) {
    if (static_cast<int32_t>(blockIdx.y) >= *groups.num_tasks) return;
    task = groups.tasks[blockIdx.y];
    p.weight = groups.weights[task.weight];
    if (p.bias) p.bias += task.weight * p.out_features;
    for (int i = threadIdx.x; i < T::kRows; i += T::kThreads)
      x_rows[i] = i < task.count ? groups.order[task.begin + i] / groups.rows_each : 0;
    __syncthreads();
  }
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t first_row = kIsGrouped ? 0 : static_cast<int64_t>(blockIdx.y) * T::kRows;
  const int64_t num_rows = kIsGrouped ? task.count : p.num_rows;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * T::kColumns;
  const int warp_row = warp / T::kWarpsAcross * T::kM * 16;
  const int warp_column = warp % T::kWarpsAcross * T::kN * 8;
  const auto* weight = static_cast<const uint16_t*>(p.weight);
  const auto load = [&](int64_t slice) {
    uint16_t* to = shared + slice % T::kStages * T::kStageElements;
    const int64_t k0 = slice * T::kDepth;
    load_slice<T>(x, first_row, num_rows, T::kRows, k0, p.in_features, to,
                  kIsGrouped ? x_rows : nullptr);
    load_slice<T>(weight, first_column, p.out_features, T::kColumns, k0, p.in_features,
                  to + T::kRows * T::kStride);
  };

  float sums[T::kM][T::kN][4] = {};
  const int64_t num_slices = (p.in_features + T::kDepth - 1) / T::kDepth;
  for (int64_t slice = 0; slice < T::kStages - 1; ++slice) {
    if (slice < num_slices) load(slice);
    commit_copies();
  }
  const int matrix = lane / 8;
  const int a_at = (warp_row + matrix % 2 * 8 + lane % 8) * T::kStride + matrix / 2 * 8;
  const int b_at =
      (T::kRows + warp_column + matrix / 2 * 8 + lane % 8) * T::kStride + matrix % 2 * 8;
  for (int64_t slice = 0; slice < num_slices; ++slice) {
    wait_for_all_but<T::kStages - 2>();
    __syncthreads();  // the slice is there, and nobody reads the one before any more
    if (slice + T::kStages - 1 < num_slices) load(slice + T::kStages - 1);
    commit_copies();
    const uint16_t* stage = shared + slice % T::kStages * T::kStageElements;
#pragma unroll
    for (int k = 0; k < T::kDepth; k += 16) {
      uint32_t a[T::kM][4];
#pragma unroll
      for (int m = 0; m < T::kM; ++m) load_matrices(a[m], stage + a_at + m * 16 * T::kStride + k);
#pragma unroll
      for (int n = 0; n < T::kN; n += 2) {
        uint32_t b[4];
        load_matrices(b, stage + b_at + n * 8 * T::kStride + k);
#pragma unroll
        for (int m = 0; m < T::kM; ++m) {
          multiply_add(sums[m][n], a[m], b[0], b[1]);
          multiply_add(sums[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < T::kM; ++m) {
#pragma unroll
    for (int n = 0; n < T::kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int64_t row = first_row + warp_row + m * 16 + lane / 4 + i / 2 * 8;
        const int64_t column = first_column + warp_column + n * 8 + lane % 4 * 2 + i % 2;
        if (row >= num_rows || column >= p.out_features) continue;
        if constexpr (kIsGrouped) row = groups.order[task.begin + row];
        float value = sums[m][n][i];
        if (p.bias) value += p.bias[column];
        float& out = p.out.data[row * p.out.stride + column];
        out = p.accumulate ? value + out : value;
      }
    }
  }
}

template <int kTile, bool kIsGrouped>
void prepare() {
  check("cudaFuncSetAttribute of linear",
        cudaFuncSetAttribute(reinterpret_cast<const void*>(mma_kernel<kTile, kIsGrouped>),
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(Tile<kTile>::kSharedBytes)));
}

template <int kTile>
void launch_tile(const uint16_t* x, const LinearParams& p, cudaStream_t stream) {
  using T = Tile<kTile>;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.out_features, T::kColumns)),
                  static_cast<unsigned>(ceil_div(p.num_rows, T::kRows)));
  launch_early("linear", mma_kernel<kTile, false>, grid, T::kThreads,
               static_cast<size_t>(T::kSharedBytes), stream, x, p, RowGroups{});
}

template <int kTile>
void launch_groups(const uint16_t* x, const LinearParams& p, const RowGroups& groups,
                   cudaStream_t stream) {
  using T = Tile<kTile>;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.out_features, T::kColumns)),
                  static_cast<unsigned>(groups.max_tasks));
  launch_early("grouped_linear", mma_kernel<kTile, true>, grid, T::kThreads,
               static_cast<size_t>(T::kSharedBytes), stream, x, p, groups);
}

}  // namespace

void prepare_mma_linear() {
  prepare<0, false>();
  prepare<1, false>();
  prepare<2, false>();
  prepare<0, true>();
  prepare<1, true>();
}

void mma_linear(const uint16_t* x, const LinearParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.out_features == 0) return;
  switch (mma_tile(params.num_rows, params.out_features)) {
    case 0:
      return launch_tile<0>(x, params, stream);
    case 1:
      return launch_tile<1>(x, params, stream);
    default:
      return launch_tile<2>(x, params, stream);
  }
}

void grouped_mma_linear(const uint16_t* x, const LinearParams& params, int64_t rows_at_once,
                        const RowGroups& groups, cudaStream_t stream) {
  if (params.num_rows == 0 || params.out_features == 0) return;
  if (rows_at_once == kSmallMma.rows)
    launch_groups<0>(x, params, groups, stream);
  else
    launch_groups<1>(x, params, groups, stream);
}

}  // namespace llmserve::cuda
