// The product of a few rows with a bf16 weight by tensor cores, M <= kMmaGemvMaxRows: one reading
// of the weight, which is what such a product costs. The weight's rows are those of A, read from
// memory as fragments; the rows of x are the columns of B. The warps of a block share K, and their
// sums meet in shared memory. On the way, x may be normed and gates be applied.
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/rows/rms.cuh"

namespace llmserve::cuda {
namespace {

constexpr int kStep = kMmaGemvStep;  // elements of K: two mma
constexpr int kLane = kStep / 4;     // neighbours that a lane takes of a row: 16 bytes of bf16

// The weight's row of a block's slot. Gated, slots [0, 8) of 16 have gates and [8, 16) what those
// are multiplied with. Beyond the last row: that again, not written.
__device__ __forceinline__ int64_t row_of(const LinearParams& p, const LinearFusion& f,
                                          int64_t first, int slot) {
  if (!f.is_gated) return first + slot < p.out_features ? first + slot : p.out_features - 1;
  const int64_t half = p.out_features / 2;
  const int64_t gate = first / 2 + slot / 16 * 8 + slot % 8;
  return (gate < half ? gate : half - 1) + (slot % 16 < 8 ? 0 : half);
}

// Block b has the slots [0, kSlots) from row b * kSlots of the weight: kRowTiles A's of 16 rows
// each, or half a one. Of K, warp w takes the steps w, w + W, ..., W = mma_gemv_warps(): lane (g,
// t) = (lane / 4, lane % 4) has the elements [8 t, 8 t + 8) of a step, four for each of two mma, of
// rows g and g + 8 of the A's and of rows g of x. An output is the sum of W chains of mma, in
// order: neither M nor kRowTiles changes a bit. A norm's factor of a row comes after the product,
// which has x times the norm's weight: all that a warp needs is its own part of x. Shared memory:
// sums [W, kSlots, kM], squares [W, kM], kM = kMmaGemvMaxRows.
template <int kRowTiles, bool kIsNarrow, bool kNorms>
__global__ void __launch_bounds__(kIsNarrow ? 512 : 128, kIsNarrow ? 1
                                                         : kNorms  ? 3
                                                                   : 4)
    mma_gemv_kernel(LinearParams p, LinearFusion f) {
  static_assert(!kIsNarrow || kRowTiles == 1);
  constexpr int kSlots = kIsNarrow ? 8 : 16 * kRowTiles;
  constexpr int kLoads = kSlots / 8;
  // Steps: 4 to 8 loads of 16 bytes a lane are being worked on, as many again on their way.
  constexpr int kBatch = kRowTiles == 2 ? 2 : 4;
  constexpr int kM = kMmaGemvMaxRows;
  static_assert(kM == 8, "the columns of B");
  LLMSERVE_DYNAMIC_SHARED(float, shared);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int num_warps = blockDim.x / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int width = static_cast<int>(p.in_features);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSlots;
  const uint16_t* from[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    from[i] = static_cast<const uint16_t*>(p.weight) +
              row_of(p, f, first, i * 8 + g) * p.in_features + t * kLane;
  }
  const int last = width - t * kLane;  // a lane's elements begin before it: K is a multiple of 8
  const auto load = [&](uint4(&w)[kBatch][kLoads], int k) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = k + b * num_warps * kStep;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        w[b][i] = at < last ? __ldcs(reinterpret_cast<const uint4*>(from[i] + at))  // read once
                            : uint4{0, 0, 0, 0};
      }
    }
  };
  // A norm's weights, for lanes that have a row of x. As of the weight, the first batch is asked
  // for before the wait: in a model they come from memory, not from a cache.
  float4 norm[kNorms ? kBatch : 1][2] = {};  // finite: beyond K it is multiplied, with zeros
  const auto load_norm = [&](int b, int at) {
    if (g >= p.num_rows || at >= width) return;
    const auto* data = reinterpret_cast<const float4*>(f.norm_weight + at);
    norm[b][0] = data[0];
    norm[b][1] = data[1];
  };
  uint4 now[kBatch][kLoads];
  load(now, warp * kStep);
  if constexpr (kNorms) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load_norm(b, (warp + b * num_warps) * kStep + t * kLane);
  }
  wait_for_previous();  // which neither depends on

  float sums[kRowTiles][4] = {};
  float squares = 0.0f;
  const int stride = kBatch * num_warps * kStep;
#pragma unroll 2
  for (int k = warp * kStep; k < width; k += stride) {
    uint4 next[kBatch][kLoads];
    load(next, k + stride);
    float4 x[kBatch][2] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = k + b * num_warps * kStep + t * kLane;
      if (g >= p.num_rows || at >= width) continue;
      const auto* data = reinterpret_cast<const float4*>(p.x.data + g * p.x.stride + at);
      x[b][0] = data[0];
      x[b][1] = data[1];
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      uint32_t columns[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float4 four = x[b][half];
        if constexpr (kNorms) {
          squares = v_fma(four.x, four.x, squares);
          squares = v_fma(four.y, four.y, squares);
          squares = v_fma(four.z, four.z, squares);
          squares = v_fma(four.w, four.w, squares);
          const float4 by = norm[b][half];
          four.x *= v_norm_weight(by.x, f.norm);
          four.y *= v_norm_weight(by.y, f.norm);
          four.z *= v_norm_weight(by.z, f.norm);
          four.w *= v_norm_weight(by.w, f.norm);
        }
        columns[2 * half] = pack_bf16(four.x, four.y);
        columns[2 * half + 1] = pack_bf16(four.z, four.w);
      }
      if constexpr (kNorms) load_norm(b, k + stride + b * num_warps * kStep + t * kLane);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const uint4 upper = now[b][kIsNarrow ? 0 : 2 * tile];
        const uint4 lower = kIsNarrow ? uint4{0, 0, 0, 0} : now[b][kLoads > 1 ? 2 * tile + 1 : 0];
        multiply_add(sums[tile], {upper.x, lower.x, upper.y, lower.y}, columns[0], columns[1]);
        multiply_add(sums[tile], {upper.z, lower.z, upper.w, lower.w}, columns[2], columns[3]);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) now[b][i] = next[b][i];
    }
  }

  float* warp_sums = shared + warp * kSlots * kM;
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < (kIsNarrow ? 2 : 4); ++i) {
      const int slot = tile * 16 + i / 2 * 8 + g;
      warp_sums[slot * kM + t * 2 + i % 2] = sums[tile][i];
    }
  }
  float* all_squares = shared + num_warps * kSlots * kM;
  if constexpr (kNorms) {
    squares += __shfl_xor_sync(kAllLanes, squares, 1);
    squares += __shfl_xor_sync(kAllLanes, squares, 2);
    if (t == 0) all_squares[warp * kM + g] = squares;
  }
  __syncthreads();

  // Gated, a thread has the sums of both slots of an output.
  const int num_slots = f.is_gated ? kSlots / 2 : kSlots;
  const int64_t num_columns = f.is_gated ? p.out_features / 2 : p.out_features;
  const auto sum_of = [&](int slot, int row) {
    float sum = 0.0f;
    for (int w = 0; w < num_warps; ++w) sum += shared[(w * kSlots + slot) * kM + row];
    return sum;
  };
  for (int e = threadIdx.x; e < num_slots * static_cast<int>(p.num_rows); e += blockDim.x) {
    const int row = e / num_slots;
    const int slot = f.is_gated ? e % num_slots / 8 * 16 + e % num_slots % 8 : e % num_slots;
    const int64_t column = (f.is_gated ? first / 2 : first) + e % num_slots;
    if (column >= num_columns) continue;
    float factor = 1.0f;
    if constexpr (kNorms) {
      float sum = 0.0f;
      for (int w = 0; w < num_warps; ++w) sum += all_squares[w * kM + row];
      factor = rms_factor(sum, p.in_features, f.norm);
    }
    float value = sum_of(slot, row) * factor;
    if (p.bias) value += p.bias[column];
    if (f.is_gated) {
      float up = sum_of(slot + 8, row) * factor;
      if (p.bias) up += p.bias[num_columns + column];
      value = v_gate(f.activation, value, up);
    }
    float& out = p.out.data[row * p.out.stride + column];
    out = p.accumulate ? value + out : value;
  }
}

template <int kRowTiles, bool kIsNarrow>
void launch_tiles(const LinearParams& p, const LinearFusion& f, cudaStream_t stream) {
  constexpr int kSlots = kIsNarrow ? 8 : 16 * kRowTiles;
  const int warps = mma_gemv_warps(p.out_features, f.is_gated);
  launch_early("linear",
               f.norm_weight ? mma_gemv_kernel<kRowTiles, kIsNarrow, true>
                             : mma_gemv_kernel<kRowTiles, kIsNarrow, false>,
               blocks(ceil_div(p.out_features, kSlots)), 32 * warps,
               static_cast<size_t>(mma_gemv_shared_bytes(warps, kSlots)), stream, p, f);
}

}  // namespace

bool can_mma_gemv(const LinearParams& p, const LinearFusion& f) {
  return p.storage == Storage::kBF16 && p.num_rows <= kMmaGemvMaxRows && p.in_features > 0 &&
         p.in_features % 8 == 0 && is_aligned(p.weight) && is_aligned(p.x) &&
         is_aligned(f.norm_weight);
}

void mma_gemv(const LinearParams& params, const LinearFusion& fusion, cudaStream_t stream) {
  if (params.num_rows == 0 || params.out_features == 0) return;
  if (mma_gemv_is_narrow(params.out_features, fusion.is_gated))
    launch_tiles<1, true>(params, fusion, stream);
  else if (mma_gemv_row_tiles(params.num_rows, params.out_features) == 1)
    launch_tiles<1, false>(params, fusion, stream);
  else
    launch_tiles<2, false>(params, fusion, stream);
}

}  // namespace llmserve::cuda
