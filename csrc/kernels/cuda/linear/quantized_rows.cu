// Rows of x as integers, each row and group of K for itself (LinearArgs), or as bfloat16, as the
// products of quantized_linear.cuh read them; or in E4M3, row by row.
#include "kernels/cuda/linear/quantized.h"
#include "kernels/cuda/rows/rms.cuh"

namespace llmserve::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostThreads = static_cast<int>(kMaxThreads);
// Groups of up to so many elements fit a warp, four neighbours a lane.
constexpr int64_t kWarpGroup = 128;
// As codes in groups that a warp or that a block has, or as bfloat16.
enum class RowKind : uint8_t { kGroups, kWide, kFloats };

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
template <bool kIsFp8>
__device__ __forceinline__ Rounding rounding_of(int32_t most_bits) {
  constexpr float kLargest = kIsFp8 ? 448.0f : 127.0f;
  if (most_bits >= 0x7f800000) return {0.0f, v_from_bits(0x7fc00000)};
  const float most = v_from_bits(most_bits);
  if (most < 1e-30f) return {0.0f, 0.0f};
  return {kLargest / most, most / kLargest};
}

// Where four neighbours from element k on, a multiple of 4, lie in a row, in elements.
__device__ __forceinline__ int64_t place_of(int64_t k, bool is_plain) {
  const int64_t within = k % kQuantizedUnit;  // 32 s + 16 h + 4 t; or 64 (w / 4) + 16 t + 4 (w % 4)
  if (is_plain) return k - within + within % 64 / 16 * 32 + within / 64 * 16 + within % 16;
  return k - within + within % 16 / 4 * 32 + within / 16 * 4;
}

__device__ __forceinline__ bool is_outlier(float x, float threshold) {
  const int32_t magnitude = v_bits(x) & 0x7fffffff;
  return threshold > 0 && magnitude < 0x7f800000 && v_from_bits(magnitude) >= threshold;
}

// Four neighbours of a row as they are to be rounded; 0 beyond the end.
template <bool kIsAligned>
__device__ __forceinline__ Four load_row(const RoundParams& p, int64_t row, int64_t k) {
  const float* from = p.x.data + row * p.x.stride;
  if (p.is_gated) {
    Four gate = load_four<kIsAligned>(from, k, p.width);
    const Four up = load_four<kIsAligned>(from + p.width, k, p.width);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      gate.at[j] = k + j < p.width ? v_gate(p.activation, gate.at[j], up.at[j]) : 0.0f;
    return gate;
  }
  Four four{};
  if (p.order == nullptr) {
    four = load_four<kIsAligned>(from, k, p.width);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (k + j < p.width) four.at[j] = from[p.order[k + j]];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (is_outlier(four.at[j], p.outlier_threshold)) four.at[j] = 0.0f;
  return four;
}
// The same of a row's norm.
template <bool kIsAligned>
__device__ __forceinline__ Four load_normed(const RoundParams& p, int64_t row, int64_t k,
                                            float factor) {
  const Four x = load_four<kIsAligned>(p.x.data + row * p.x.stride, k, p.width);
  const Four weight = load_four<kIsAligned>(p.norm_weight, k, p.width);
  Four four = normed(x, factor, weight, p.norm);
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (k + j >= p.width) four.at[j] = 0.0f;
  return four;
}

// Four neighbours from element k on, a multiple of 4, to where the kernels look for them. Returns
// their sum, of integers.
template <bool kIsFp8>
__device__ __forceinline__ int32_t round_four(const Four& x, float inverse, int64_t k,
                                              const RoundParams& p, int64_t row) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23 leaves the nearest integer in the low bits
  uint32_t packed = 0;
  int32_t sum = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    // Not the product where it would be NaN.
    const float scaled = inverse == 0.0f ? 0.0f : x.at[j] * inverse;
    const int32_t q = kIsFp8 ? v_to_fp8(scaled) : v_bits(scaled + kShift) - v_bits(kShift);
    packed |= (static_cast<uint32_t>(q) & 0xffu) << 8 * j;
    sum += q;
  }
  std::byte* to = kIsFp8 ? p.to_fp8.rows + row * p.to_fp8.stride + k
                         : p.to.rows + row * p.to.stride + place_of(k, false);
  *reinterpret_cast<uint32_t*>(to) = packed;
  return sum;
}
template <bool kIsFp8>
__device__ __forceinline__ void store_group(const RoundParams& p, int64_t row, int64_t group,
                                            int64_t num_groups, float scale, int32_t sum) {
  if constexpr (kIsFp8)
    p.to_fp8.scales[group * p.to_fp8.num_rows + row] = scale;
  else
    p.to.groups[row * num_groups + group] = {scale, sum};
}
// Bytes of a row of codes, as many as it has elements in whole units.
template <bool kIsFp8>
__device__ __forceinline__ int64_t row_codes(const RoundParams& p) {
  return kIsFp8 ? p.to_fp8.stride : p.to.stride;
}

// A lane's four neighbours of 128 that a warp has; a group is 4, 8, 16 or 32 lanes.
template <bool kIsFp8>
__device__ __forceinline__ void round_groups(const RoundParams& p, int64_t row, int64_t k,
                                             const Four& four, int64_t group_size,
                                             int64_t num_groups) {
  int32_t most = largest_magnitude(four);
  const int lanes = static_cast<int>(group_size / 4);
  for (int offset = 1; offset < lanes; offset *= 2)
    most = larger(most, __shfl_xor_sync(kAllLanes, most, offset));
  const Rounding rounding = rounding_of<kIsFp8>(most);
  int32_t sum = round_four<kIsFp8>(four, rounding.inverse, k, p, row);
  for (int offset = 1; offset < lanes; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  if (k % group_size == 0 && k < p.width)
    store_group<kIsFp8>(p, row, k / group_size, num_groups, rounding.scale, sum);
}

// A group by the block's threads, which stride over its fours; the last group up to the end of the
// row's memory. of_warps [32] may be used again when it returns.
template <bool kIsFp8, class LoadFour>
__device__ __forceinline__ void round_group(const RoundParams& p, int64_t row, int64_t group,
                                            int64_t group_size, int64_t num_groups,
                                            int32_t* of_warps, LoadFour load) {
  const int64_t begin = group * group_size;
  const int64_t end = group + 1 == num_groups ? row_codes<kIsFp8>(p) : begin + group_size;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int num_warps = blockDim.x / 32;
  int32_t most = 0;
  for (int64_t k = begin + threadIdx.x * 4; k < end; k += blockDim.x * 4)
    most = larger(most, largest_magnitude(load(k)));
  for (int offset = 16; offset > 0; offset /= 2)
    most = larger(most, __shfl_xor_sync(kAllLanes, most, offset));
  if (lane == 0) of_warps[warp] = most;
  __syncthreads();
  most = 0;
  for (int w = 0; w < num_warps; ++w) most = larger(most, of_warps[w]);
  const Rounding rounding = rounding_of<kIsFp8>(most);
  int32_t sum = 0;
  for (int64_t k = begin + threadIdx.x * 4; k < end; k += blockDim.x * 4)
    sum += round_four<kIsFp8>(load(k), rounding.inverse, k, p, row);
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  __syncthreads();  // the maxima have been read
  if (lane == 0) of_warps[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
    for (int w = 0; w < num_warps; ++w) sum += of_warps[w];
    store_group<kIsFp8>(p, row, group, num_groups, rounding.scale, sum);
  }
  __syncthreads();
}

// blockIdx.y: row.
template <bool kIsAligned, bool kIsFp8>
__global__ void __launch_bounds__(kThreads)
    round_groups_kernel(RoundParams p, int64_t group_size, int64_t num_groups) {
  wait_for_previous();
  const int64_t row = blockIdx.y;
  const int64_t k = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (k - k % kWarpGroup >= row_codes<kIsFp8>(p)) return;  // whole warps
  round_groups<kIsFp8>(p, row, k, load_row<kIsAligned>(p, row, k), group_size, num_groups);
}

// blockIdx.x: group, blockIdx.y: row.
template <bool kIsAligned, bool kIsFp8>
__global__ void __launch_bounds__(kMostThreads)
    round_wide_kernel(RoundParams p, int64_t group_size, int64_t num_groups) {
  __shared__ int32_t of_warps[32];
  wait_for_previous();
  const int64_t row = blockIdx.y;
  round_group<kIsFp8>(p, row, blockIdx.x, group_size, num_groups, of_warps,
                      [&](int64_t k) { return load_row<kIsAligned>(p, row, k); });
}

// blockIdx.y: row, whose norm comes first: the sums of the norm's own warps, as in gemv.cu.
template <bool kIsAligned, RowKind kKind, bool kIsFp8>
__global__ void __launch_bounds__(kMostThreads)
    round_normed_kernel(RoundParams p, int64_t group_size, int64_t num_groups) {
  __shared__ int32_t of_warps[32];
  __shared__ float partial[32];
  wait_for_previous();
  const int64_t row = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int num_warps = blockDim.x / 32;
  const int norm_warps = p.norm_threads / 32;
  for (int w = warp; w < norm_warps; w += num_warps) {
    const float sum = warp_squares(p.x.data + row * p.x.stride, p.width, p.norm_threads, w);
    if (lane == 0) partial[w] = sum;
  }
  __syncthreads();
  const float squares = sum_of_warps(lane < norm_warps ? partial[lane] : 0.0f, norm_warps);
  const float factor = rms_factor(squares, p.width, p.norm);
  const auto load = [&](int64_t k) { return load_normed<kIsAligned>(p, row, k, factor); };
  if constexpr (kKind == RowKind::kWide) {
    for (int64_t group = 0; group < num_groups; ++group)
      round_group<kIsFp8>(p, row, group, group_size, num_groups, of_warps, load);
  } else if constexpr (kKind == RowKind::kGroups) {
    for (int64_t first = warp * kWarpGroup; first < row_codes<kIsFp8>(p);
         first += num_warps * kWarpGroup)
      round_groups<kIsFp8>(p, row, first + lane * 4, load(first + lane * 4), group_size,
                           num_groups);
  } else {
    auto* out = reinterpret_cast<uint16_t*>(p.to.rows + row * p.to.stride);
    for (int64_t k = threadIdx.x * 4; 2 * k < p.to.stride; k += blockDim.x * 4)
      store_four<true>(out + place_of(k, p.is_plain), 0, 4, load(k));
  }
}

// blockIdx.y: row.
template <bool kIsAligned>
__global__ void __launch_bounds__(kThreads) round_floats_kernel(RoundParams p, int64_t, int64_t) {
  wait_for_previous();
  const int64_t row = blockIdx.y;
  const int64_t k = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (2 * k >= p.to.stride) return;
  auto* out = reinterpret_cast<uint16_t*>(p.to.rows + row * p.to.stride) + place_of(k, p.is_plain);
  store_four<true>(out, 0, 4, load_row<kIsAligned>(p, row, k));
}

// blockIdx.x: part of the weight's rows. blockIdx.y: row of x, whose elements all threads look at.
__global__ void __launch_bounds__(kThreads)
    add_outliers_kernel(RoundParams rows, QuantizedParams product) {
  wait_for_previous();
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= product.out_features) return;
  const QuantizedLayout& layout = product.layout;
  const int64_t row = blockIdx.y;
  const std::byte* tile = product.weight + n / kQuantizedTile * layout.tile_bytes;
  float sum = 0.0f;
  bool has_any = false;
  for (int64_t k = 0; k < rows.width; ++k) {
    const float x = rows.x.data[row * rows.x.stride + (rows.order ? rows.order[k] : k)];
    if (!is_outlier(x, rows.outlier_threshold)) continue;
    has_any = true;
    // Word 2 s + h of lane (g, t), byte j.
    const int64_t word = k % kQuantizedUnit / 16;
    const int64_t lane = n % kQuantizedTile * 4 + k % 16 / 4;
    const int64_t at = word / 4 * 512 + lane * 16 + word % 4 * 4 + k % 4;
    const auto q = static_cast<int8_t>(tile[k / kQuantizedUnit * layout.unit_bytes + at]);
    sum = sum + x * static_cast<float>(q);
  }
  if (!has_any) return;
  const auto* scales = reinterpret_cast<const float*>(
      tile + int64_t{layout.num_units} * layout.unit_bytes + layout.scales_begin);
  float& out = product.out.data[row * product.out.stride + n];
  out = out + scales[n % kQuantizedTile] * sum;
}

// That of rows as codes.
template <RowKind kKind, bool kIsFp8>
auto codes_kernel(bool is_normed, bool is_aligned) -> void (*)(RoundParams, int64_t, int64_t) {
  if (is_normed)
    return is_aligned ? &round_normed_kernel<true, kKind, kIsFp8>
                      : &round_normed_kernel<false, kKind, kIsFp8>;
  if constexpr (kKind == RowKind::kWide)
    return is_aligned ? &round_wide_kernel<true, kIsFp8> : &round_wide_kernel<false, kIsFp8>;
  else
    return is_aligned ? &round_groups_kernel<true, kIsFp8> : &round_groups_kernel<false, kIsFp8>;
}

// Rows in launches of as many as a grid has along y.
template <class Launch>
void for_rows(const RoundParams& params, int64_t num_groups, Launch launch_some) {
  for (int64_t first = 0; first < params.num_rows; first += kMaxGridYZ) {
    RoundParams part = params;
    part.num_rows = std::min(kMaxGridYZ, params.num_rows - first);
    part.x.data += first * part.x.stride;
    part.to.rows += first * part.to.stride;
    part.to.groups += first * num_groups;
    part.to_fp8.rows += first * part.to_fp8.stride;
    part.to_fp8.scales += first;
    launch_some(part, first);
  }
}

}  // namespace

void round_rows(const RoundParams& given, const QuantizedLayout& layout, cudaStream_t stream) {
  RoundParams params = given;
  params.is_plain = layout.is_plain;
  const int64_t num_groups = layout.num_groups;
  const int64_t group_size = layout.group_size;
  const bool is_fp8 = params.to_fp8.rows != nullptr;
  const bool is_float = has_float_products(layout.coding) && !is_fp8;
  const bool is_wide =
      kWarpGroup % std::max<int64_t>(group_size, 1) != 0 || group_size < 16 || num_groups == 1;
  const RowKind kind = is_float ? RowKind::kFloats : is_wide ? RowKind::kWide : RowKind::kGroups;
  const int64_t elements = is_fp8     ? params.to_fp8.stride
                           : is_float ? params.to.stride / 2
                                      : params.to.stride;
  const bool aligned =
      is_aligned(params.x) && params.width % 4 == 0 && is_aligned(params.norm_weight);
  if (elements == 0) return;
  const auto pick = [&](auto yes, auto no) { return aligned ? yes : no; };
  const auto kernel_for = [&]() -> void (*)(RoundParams, int64_t, int64_t) {
    const bool is_normed = params.norm_weight != nullptr;
    switch (kind) {
      case RowKind::kFloats:
        return is_normed ? pick(&round_normed_kernel<true, RowKind::kFloats, false>,
                                &round_normed_kernel<false, RowKind::kFloats, false>)
                         : pick(&round_floats_kernel<true>, &round_floats_kernel<false>);
      case RowKind::kWide:
        return is_fp8 ? codes_kernel<RowKind::kWide, true>(is_normed, aligned)
                      : codes_kernel<RowKind::kWide, false>(is_normed, aligned);
      default:
        return is_fp8 ? codes_kernel<RowKind::kGroups, true>(is_normed, aligned)
                      : codes_kernel<RowKind::kGroups, false>(is_normed, aligned);
    }
  };
  int64_t across = 1;
  int threads = row_threads(ceil_div(elements, 4), kMaxThreads);
  if (!params.norm_weight && kind == RowKind::kWide) {
    across = num_groups;
    threads = row_threads(ceil_div(group_size, 4), kMaxThreads);
  } else if (!params.norm_weight) {
    across = ceil_div(elements / 4, kThreads);
    threads = kThreads;
  }
  for_rows(params, num_groups, [&](const RoundParams& part, int64_t) {
    launch_early("linear", kernel_for(),
                 dim3(static_cast<unsigned>(across), static_cast<unsigned>(part.num_rows)), threads,
                 0, stream, part, group_size, num_groups);
  });
}

void add_outliers(const RoundParams& rows, const QuantizedParams& product, cudaStream_t stream) {
  for_rows(rows, 1, [&](const RoundParams& part, int64_t first) {
    QuantizedParams to = product;
    to.out.data += first * to.out.stride;
    launch_early("linear", add_outliers_kernel,
                 dim3(static_cast<unsigned>(ceil_div(product.out_features, kThreads)),
                      static_cast<unsigned>(part.num_rows)),
                 kThreads, 0, stream, part, to);
  });
}

}  // namespace llmserve::cuda
