// The plain matrix product: what runs without cuBLAS, what checks it, and what does not depend on
// how many rows there are.
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch_math.h"
#include "kernels/cuda/linear/grouped.h"

namespace llmserve::cuda {
namespace {

// out[m, n] for m in [blockIdx.y * kRows, + kRows), or the rows of task blockIdx.y, n in
// [blockIdx.x * kColumns, + kColumns). 256 threads; thread t computes rows (t / kThreadColumns) + i
// * kThreadRows and columns (t % kThreadColumns) + j * kThreadColumns of the tile, i < kRowsEach, j
// < kColumnsEach: neighbours in a warp have neighbouring columns, so that reads of shared memory do
// not collide and writes coalesce. K goes by in slices of kDepth; beyond its end both sides are 0,
// which leaves a sum as it is. Shared memory: (kRows + kColumns + 2) * kDepth * 4 bytes, at
// most 8.3 KiB.
template <Storage kStorage, int kRows, int kColumns, int kDepth, bool kIsGrouped>
__global__ void __launch_bounds__(256) linear_kernel(LinearParams p, RowGroups groups) {
  constexpr int kThreads = 256;
  constexpr int kThreadColumns = kColumns < 32 ? kColumns : (kRows < 16 ? 32 : 16);
  constexpr int kThreadRows = kThreads / kThreadColumns;
  constexpr int kRowsEach = kRows / kThreadRows;
  constexpr int kColumnsEach = kColumns / kThreadColumns;
  static_assert(kRowsEach * kThreadRows == kRows && kColumnsEach * kThreadColumns == kColumns);
  __shared__ float x_tile[kDepth][kRows + 1];
  __shared__ float w_tile[kDepth][kColumns + 1];

  int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  int64_t num_rows = p.num_rows;
  if constexpr (kIsGrouped) {
    if (static_cast<int32_t>(blockIdx.y) >= *groups.num_tasks) return;
    const RowTask task = groups.tasks[blockIdx.y];
    p.weight = groups.weights[task.weight];
    if (p.bias) p.bias += task.weight * p.out_features;
    first_row = task.begin;
    num_rows = first_row + task.count;
  }
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kColumns;
  const int thread_row = threadIdx.x / kThreadColumns;
  const int thread_column = threadIdx.x % kThreadColumns;
  float sums[kRowsEach][kColumnsEach] = {};

  for (int64_t k0 = 0; k0 < p.in_features; k0 += kDepth) {
    for (int e = threadIdx.x; e < kRows * kDepth; e += kThreads) {
      const int64_t row = first_row + e / kDepth;
      const int64_t k = k0 + e % kDepth;
      float value = 0.0f;
      if (row < num_rows && k < p.in_features) {
        const int64_t from = kIsGrouped ? groups.order[row] / groups.rows_each : row;
        value = p.x.data[from * p.x.stride + k];
        if constexpr (kStorage == Storage::kBF16) value = bf16_to_float(float_to_bf16(value));
      }
      x_tile[e % kDepth][e / kDepth] = value;
    }
    for (int e = threadIdx.x; e < kColumns * kDepth; e += kThreads) {
      const int64_t column = first_column + e / kDepth;
      const int64_t k = k0 + e % kDepth;
      w_tile[e % kDepth][e / kDepth] = column < p.out_features && k < p.in_features
                                           ? load<kStorage>(p.weight, column * p.in_features + k)
                                           : 0.0f;
    }
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnsEach; ++j) {
          sums[i][j] = v_fma(x_tile[k][thread_row + i * kThreadRows],
                             w_tile[k][thread_column + j * kThreadColumns], sums[i][j]);
        }
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    int64_t row = first_row + thread_row + i * kThreadRows;
    if (row >= num_rows) continue;
    if constexpr (kIsGrouped) row = groups.order[row];
#pragma unroll
    for (int j = 0; j < kColumnsEach; ++j) {
      const int64_t column = first_column + thread_column + j * kThreadColumns;
      if (column >= p.out_features) continue;
      float value = sums[i][j];
      if (p.bias) value += p.bias[column];
      float& out = p.out.data[row * p.out.stride + column];
      out = p.accumulate ? value + out : value;
    }
  }
}

template <Storage kStorage>
void launch_tiles(const LinearParams& p, cudaStream_t stream) {
  const GemmTile tile = gemm_tile(p.num_rows);
  const dim3 grid(static_cast<unsigned>(gemm_blocks_x(p.out_features, tile)),
                  static_cast<unsigned>(gemm_blocks_y(p.num_rows, tile)));
  if (tile.rows == kSmallTile.rows)
    launch("linear", linear_kernel<kStorage, kSmallTile.rows, kSmallTile.columns, 64, false>, grid,
           256, 0, stream, p, RowGroups{});
  else
    launch("linear", linear_kernel<kStorage, kLargeTile.rows, kLargeTile.columns, 16, false>, grid,
           256, 0, stream, p, RowGroups{});
}

template <Storage kStorage>
void launch_groups(const LinearParams& p, const RowGroups& groups, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(gemm_blocks_x(p.out_features, kSmallTile)),
                  static_cast<unsigned>(groups.max_tasks));
  launch("grouped_linear", linear_kernel<kStorage, kSmallTile.rows, kSmallTile.columns, 64, true>,
         grid, 256, 0, stream, p, groups);
}

}  // namespace

void plain_linear(const LinearParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.out_features == 0) return;
  if (params.storage == Storage::kF32)
    launch_tiles<Storage::kF32>(params, stream);
  else
    launch_tiles<Storage::kBF16>(params, stream);
}

void grouped_plain_linear(const LinearParams& params, const RowGroups& groups,
                          cudaStream_t stream) {
  if (params.num_rows == 0 || params.out_features == 0) return;
  if (params.storage == Storage::kF32)
    launch_groups<Storage::kF32>(params, groups, stream);
  else
    launch_groups<Storage::kBF16>(params, groups, stream);
}

}  // namespace llmserve::cuda
