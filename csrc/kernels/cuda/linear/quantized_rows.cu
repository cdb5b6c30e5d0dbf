// Rows of x as integers, each row and group of K for itself (LinearArgs), for the products with
// weights of integers.
#include "kernels/cuda/fours.cuh"
#include "kernels/cuda/linear/quantized.h"

namespace llmserve::cuda {
namespace {

constexpr int kThreads = 256;
// Groups of up to so many elements fit a warp, four neighbours a lane.
constexpr int64_t kWarpGroup = 128;

__device__ __forceinline__ int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

// Integers order magnitudes, and NaN is above infinity.
__device__ __forceinline__ int32_t largest_magnitude(const Four& x) {
  int32_t most = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) most = larger(most, v_bits(x.at[j]) & 0x7fffffff);
  return most;
}

// What a group's values are multiplied with, and its scale.
struct Rounding {
  float inverse;
  float scale;
};
__device__ __forceinline__ Rounding rounding_of(int32_t most_bits) {
  if (most_bits >= 0x7f800000) return {0.0f, v_from_bits(0x7fc00000)};
  const float most = v_from_bits(most_bits);
  if (most < 1e-30f) return {0.0f, 0.0f};
  return {127.0f / most, most / 127.0f};
}

// Four neighbours from element k on, a multiple of 4, to where the kernels look for them. Returns
// their sum.
__device__ __forceinline__ int32_t round_four(const Four& x, float inverse, int64_t k,
                                              int8_t* row) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23 leaves the nearest integer in the low bits
  uint32_t packed = 0;
  int32_t sum = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    // Not the product where it would be NaN.
    const float scaled = inverse == 0.0f ? 0.0f : x.at[j] * inverse;
    const int32_t q = v_bits(scaled + kShift) - v_bits(kShift);
    packed |= (static_cast<uint32_t>(q) & 0xffu) << 8 * j;
    sum += q;
  }
  const int64_t within = k % kQuantizedUnit;  // 32 s + 16 h + 4 t
  const int64_t to = k - within + within % 16 / 4 * 32 + within / 16 * 4;
  *reinterpret_cast<uint32_t*>(row + to) = packed;
  return sum;
}

// blockIdx.y: row. Lanes of a warp have four neighbours each of 128; a group is 4, 8, 16 or 32 of
// them.
template <bool kIsAligned>
__global__ void __launch_bounds__(kThreads)
    round_groups_kernel(ConstRows x, int64_t width, int64_t group_size, int64_t num_groups,
                        RoundedX to) {
  wait_for_previous();
  const int64_t row = blockIdx.y;
  const int64_t stride = to.stride;
  const int64_t k = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (k - k % kWarpGroup >= stride) return;  // whole warps
  const Four four = load_four<kIsAligned>(x.data + row * x.stride, k, width);
  int32_t most = largest_magnitude(four);
  const int lanes = static_cast<int>(group_size / 4);
  for (int offset = 1; offset < lanes; offset *= 2)
    most = larger(most, __shfl_xor_sync(kAllLanes, most, offset));
  const Rounding rounding = rounding_of(most);
  int32_t sum = round_four(four, rounding.inverse, k, to.q + row * stride);
  for (int offset = 1; offset < lanes; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  if (k % group_size == 0 && k < width)
    to.groups[row * num_groups + k / group_size] = {rounding.scale, sum};
}

// blockIdx.x: group, blockIdx.y: row. The block's threads stride over the group's fours. Of the
// last group, up to the end of the row's memory.
template <bool kIsAligned>
__global__ void __launch_bounds__(1024)
    round_wide_kernel(ConstRows x, int64_t width, int64_t group_size, int64_t num_groups,
                      RoundedX to) {
  __shared__ int32_t of_warps[32];
  wait_for_previous();
  const int64_t row = blockIdx.y;
  const int64_t stride = to.stride;
  const int64_t group = blockIdx.x;
  const float* from = x.data + row * x.stride;
  const int64_t begin = group * group_size;
  const int64_t end = group + 1 == num_groups ? stride : begin + group_size;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int num_warps = blockDim.x / 32;
  int32_t most = 0;
  for (int64_t k = begin + threadIdx.x * 4; k < end; k += blockDim.x * 4)
    most = larger(most, largest_magnitude(load_four<kIsAligned>(from, k, width)));
  for (int offset = 16; offset > 0; offset /= 2)
    most = larger(most, __shfl_xor_sync(kAllLanes, most, offset));
  if (lane == 0) of_warps[warp] = most;
  __syncthreads();
  most = 0;
  for (int w = 0; w < num_warps; ++w) most = larger(most, of_warps[w]);
  const Rounding rounding = rounding_of(most);
  int32_t sum = 0;
  for (int64_t k = begin + threadIdx.x * 4; k < end; k += blockDim.x * 4)
    sum +=
        round_four(load_four<kIsAligned>(from, k, width), rounding.inverse, k, to.q + row * stride);
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  __syncthreads();  // the maxima have been read
  if (lane == 0) of_warps[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (int w = 0; w < num_warps; ++w) sum += of_warps[w];
  to.groups[row * num_groups + group] = {rounding.scale, sum};
}

}  // namespace

void round_to_integers(ConstRows x, int64_t num_rows, int64_t width, int64_t group_size,
                       const RoundedX& to, cudaStream_t stream) {
  if (num_rows == 0) return;
  // Of which the last may be shorter.
  const int64_t num_groups = group_size == 0 ? 1 : ceil_div(width, group_size);
  const bool aligned = is_aligned(x) && width % 4 == 0;
  const bool is_narrow = group_size <= kWarpGroup && num_groups > 1;
  const int64_t across = is_narrow ? ceil_div(to.stride / 4, kThreads) : num_groups;
  const int threads = is_narrow ? kThreads : row_threads(ceil_div(group_size, 4), kMaxThreads);
  // Rows in launches of as many as a grid has along y.
  for (int64_t first = 0; first < num_rows; first += kMaxGridYZ) {
    const dim3 grid(static_cast<unsigned>(across),
                    static_cast<unsigned>(std::min(kMaxGridYZ, num_rows - first)));
    const ConstRows rows{x.data + first * x.stride, x.stride};
    const RoundedX part{to.q + first * to.stride, to.stride, to.groups + first * num_groups};
    const auto kernel = is_narrow
                            ? (aligned ? round_groups_kernel<true> : round_groups_kernel<false>)
                            : (aligned ? round_wide_kernel<true> : round_wide_kernel<false>);
    launch_early("linear", kernel, grid, threads, 0, stream, rows, width, group_size, num_groups,
                 part);
  }
}

}  // namespace llmserve::cuda
