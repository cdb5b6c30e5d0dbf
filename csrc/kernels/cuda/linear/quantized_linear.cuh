// The product of rows of integers with a weight of integers by tensor cores, one reading of the
// weight. The weight's rows are those of A of mma.m16n8k32, the rows of x the columns of B; sums of
// integers are exact in any order, and what is in floats has one order whatever M is.
#pragma once

#include <type_traits>

#include "kernels/cuda/linear/quantized.h"
#include "kernels/cuda/mma.cuh"

namespace llmserve::cuda {

// What is made for it: a kernel for few rows (8 columns, 16 rows of the weight a warp) and one for
// more of them (32 and 32).
template <int kBits, Coding kIsCoding, GroupWidth kWidth>
struct QuantizedKind {
  static constexpr int kIsBits = kBits;
  static constexpr Coding kCoding = kIsCoding;
  static constexpr bool kIsFloat = kIsCoding == Coding::kValues || kIsCoding == Coding::kFp8;
  static constexpr GroupWidth kGroups = kWidth;
};

// Units of a warp that are on their way or worked on; a unit of a tile is some 512 to 1100 bytes.
constexpr int quantized_stages(int bits, int tiles) {
  return tiles <= 2 ? (bits <= 4 ? 4 : 3) : (bits <= 4 ? 3 : 2);
}
// Shared memory of a block: its warps' units, and later what they have summed.
inline int64_t quantized_shared_bytes(const QuantizedLayout& layout, int tiles, int columns) {
  const int64_t units = int64_t{quantized_stages(layout.bits, tiles)} * tiles * layout.unit_bytes;
  const int64_t sums = int64_t{tiles} * kQuantizedTile * columns * 4;
  return kQuantizedParts * std::max(units, sums);
}

// Host constants, as constants that device code may use.
template <class Kind, int kTiles>
struct QuantizedShape {
  static constexpr int kStages = quantized_stages(Kind::kIsBits, kTiles);
};

// A lane's 32 integers of a unit, as they are stored.
template <int kBits, Coding kCoding>
struct LaneUnit {
  static constexpr bool kIsTable = kCoding == Coding::kTable || kCoding == Coding::kValues;
  static constexpr bool kHasFours = kBits >= 4 && kBits < 8;
  static constexpr bool kHasTwos = kBits == 2 || kBits == 3 || kBits == 6;
  static constexpr bool kHasOnes = kBits == 3 || kBits == 5;
  uint32_t words[kBits == 8 ? 8 : 4];  // bytes, or fours
  uint32_t twos[2];
  uint32_t ones;

  __device__ __forceinline__ void load(const std::byte* unit, int lane) {
    const std::byte* plane = unit;
    if constexpr (kHasFours || kBits == 8) {
#pragma unroll
      for (int i = 0; i < (kBits == 8 ? 2 : 1); ++i) {
        const uint4 four = *reinterpret_cast<const uint4*>(plane + lane * 16);
        words[4 * i] = four.x;
        words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z;
        words[4 * i + 3] = four.w;
        plane += 32 * 16;
      }
    }
    if constexpr (kHasTwos) {
      const uint2 two = *reinterpret_cast<const uint2*>(plane + lane * 8);
      twos[0] = two.x;
      twos[1] = two.y;
      plane += 32 * 8;
    }
    if constexpr (kHasOnes) ones = *reinterpret_cast<const uint32_t*>(plane + lane * 4);
  }
  // Bits 0 to 2 of an index choose in both halves of the table, bit 3 between what they gave.
  __device__ __forceinline__ uint32_t look_up(int s, int h, const uint32_t (&table)[4]) const {
    const uint32_t index = words[s] >> 16 * h;
    const uint32_t low = __byte_perm(table[0], table[1], index & 0x7777u);
    const uint32_t high = __byte_perm(table[2], table[3], index & 0x7777u);
    return __byte_perm(low, high, 0x3210u | (index & 0x8888u) >> 1);
  }
  // Those of (s, h) as bfloat16: 0 and 1, 2 and 3.
  __device__ __forceinline__ uint2 floats(int s, int h, const QuantizedLayout& layout) const {
    if constexpr (kIsTable) {
      const uint32_t low = look_up(s, h, layout.table);
      const uint32_t high = look_up(s, h, layout.table_high);
      return {__byte_perm(low, high, 0x5140u), __byte_perm(low, high, 0x7362u)};
    }
    constexpr uint32_t kOnes = 0x3f803f80u;
    const uint32_t codes = words[2 * s + h];
    return {widen_codes(__byte_perm(codes, 0, 0x1404u), kOnes),
            widen_codes(__byte_perm(codes, 0, 0x3424u), kOnes)};
  }
  // Those of (s, h), a byte each.
  __device__ __forceinline__ uint32_t bytes(int s, int h, const QuantizedLayout& layout) const {
    if constexpr (kBits == 8) return words[2 * s + h];
    if constexpr (kIsTable) return look_up(s, h, layout.table);
    uint32_t value = 0;
    if constexpr (kHasFours) value = words[s] >> 4 * h & 0x0f0f0f0fu;
    if constexpr (kHasTwos) {
      const uint32_t two = twos[s / 2] >> (4 * (s % 2) + 2 * h) & 0x03030303u;
      value |= kBits == 6 ? two << 4 : two;
    }
    if constexpr (kHasOnes) {
      const uint32_t one = ones >> (2 * s + h) & 0x01010101u;
      value |= one << (kBits - 1);
    }
    return value;
  }
};

// Entry `at` of an array of scales.
__device__ __forceinline__ float scale_at(const std::byte* scales, int at, ScaleKind kind) {
  if (kind == ScaleKind::kF16) return f16_to_float(reinterpret_cast<const uint16_t*>(scales)[at]);
  if (kind == ScaleKind::kBF16) return bf16_to_float(reinterpret_cast<const uint16_t*>(scales)[at]);
  if (kind == ScaleKind::kF32) return reinterpret_cast<const float*>(scales)[at];
  const auto byte = static_cast<uint8_t>(scales[at]);
  return kind == ScaleKind::kE4M3 ? v_from_fp8(byte) : v_from_bits(int32_t{byte} << 23);
}
// What is taken off the integers of a group.
__device__ __forceinline__ int32_t group_zero(const QuantizedLayout& layout, const std::byte* unit,
                                              int row, int at) {
  if (!layout.has_zero) return layout.zero_point;
  return reinterpret_cast<const int16_t*>(unit + layout.zeros_begin)[row * layout.unit_groups + at];
}
// Of row `row` of a tile, the scale or the minimum of group `at` of a unit, or of its only group.
__device__ __forceinline__ float group_scale(const QuantizedLayout& layout, const std::byte* unit,
                                             int scales_begin, int codes_begin, int row, int at) {
  const int place = row * layout.unit_groups + at;
  const float scale = scale_at(unit + scales_begin, layout.has_codes ? row : place, layout.scale);
  if (!layout.has_codes) return scale;
  return scale * static_cast<float>(reinterpret_cast<const int8_t*>(unit + codes_begin)[place]);
}

// Block (b, c) has the weight's tiles [b * kTiles, + kTiles) and the rows [c * 8 * kColumnTiles, +
// 8
// * kColumnTiles) of x. Warp w has part w of K: units [w U / W, (w + 1) U / W) in steps of whole
// groups. The units of a warp's tiles come to its own ring in shared memory, kStages - 1 of them on
// their way. Tiles and rows beyond the last are the last again, not written.
template <class Kind, int kTiles, int kColumnTiles>
__global__ void __launch_bounds__(32 * kQuantizedParts) quantized_kernel(const QuantizedParams p) {
  constexpr int kStages = QuantizedShape<Kind, kTiles>::kStages;
  constexpr int kRows = kTiles * kQuantizedTile;  // of the weight
  constexpr int kColumns = 8 * kColumnTiles;
  constexpr bool kIsFloat = Kind::kIsFloat;
  constexpr int kLaneBytes = kIsFloat ? 64 : 32;  // of a unit of x
  using Dot = std::conditional_t<kIsFloat, float, int32_t>;
  static_assert(kTiles % 2 == 0);
  LLMSERVE_DYNAMIC_SHARED(std::byte, shared);
  const QuantizedLayout& layout = p.layout;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const bool is_whole = layout.num_groups == 1;
  const int64_t last_tile = (p.out_features - 1) / kQuantizedTile;
  const int64_t first_tile = static_cast<int64_t>(blockIdx.x) * kTiles;
  const std::byte* weight = p.weight;
  const float* bias = p.bias;
  int64_t first_row = static_cast<int64_t>(blockIdx.y) * kColumns;
  int64_t rows_left = p.num_rows - first_row;
  if (p.groups.tasks) {
    wait_for_previous();
    if (static_cast<int32_t>(blockIdx.y) >= *p.groups.num_tasks) return;
    const RowTask task = p.groups.tasks[blockIdx.y];
    weight = static_cast<const std::byte*>(p.groups.weights[task.weight]);
    if (bias) bias += task.weight * p.out_features;
    first_row = task.begin;
    rows_left = task.count;
  }
  const int num_columns = static_cast<int>(rows_left < kColumns ? rows_left : kColumns);

  // The warp's part, in steps of whole groups.
  const int step = layout.step_units;
  const int num_steps = (layout.num_units + step - 1) / step;
  const auto part_begin = [&](int part) {
    const int begin = num_steps * part / kQuantizedParts * step;
    return begin < layout.num_units ? begin : layout.num_units;
  };
  const int begin = part_begin(warp);
  const int end = part_begin(warp + 1);

  const int64_t padded = (last_tile + 1) * kQuantizedTile;  // N', of a plain layout
  const std::byte* plain_scales = weight + padded * layout.num_units * kQuantizedUnit;
  std::byte* ring = shared + warp * kStages * kTiles * layout.unit_bytes;
  const auto load = [&](int u) {
    std::byte* to = ring + u % kStages * kTiles * layout.unit_bytes;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t at = first_tile + tile < last_tile ? first_tile + tile : last_tile;
      if constexpr (Kind::kCoding == Coding::kFp8) {
        if (layout.is_plain) {
          constexpr int kCodes = kQuantizedTile * kQuantizedUnit;
          std::byte* unit = to + tile * layout.unit_bytes;
          for (int i = lane * 16; i < kCodes; i += 32 * 16) {
            const int row = i / kQuantizedUnit;
            const int piece = i % kQuantizedUnit / 16;
            const int64_t from = (at * kQuantizedTile + row) * layout.num_units + u;
            copy_async(unit + piece / 4 * 512 + (row * 4 + piece % 4) * 16,
                       weight + from * kQuantizedUnit + piece * 16, true);
          }
          if (lane * 16 < layout.unit_bytes - kCodes)
            copy_async(unit + kCodes + lane * 16,
                       plain_scales + (u * padded + at * kQuantizedTile) * 4 + lane * 16, true);
          continue;
        }
      }
      const std::byte* from = weight + at * layout.tile_bytes + int64_t{u} * layout.unit_bytes;
      for (int i = lane * 16; i < layout.unit_bytes; i += 32 * 16)
        copy_async(to + tile * layout.unit_bytes + i, from + i, true);
    }
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (begin + i < end) load(begin + i);
    commit_copies();
  }
  wait_for_previous();  // which the weight does not depend on

  // Column c's row of out, and of x.
  const auto row_at = [&](int column) -> int64_t {
    const int64_t at = first_row + (column < num_columns ? column : num_columns - 1);
    return p.groups.tasks ? p.groups.order[at] : at;
  };
  const auto x_row_at = [&](int column) -> int64_t {
    const int64_t row = row_at(column);
    return p.groups.tasks ? static_cast<int32_t>(row) / p.groups.rows_each : row;
  };
  const std::byte* x_rows[kColumnTiles];
  const RoundedGroup* x_groups[kColumnTiles][2];
#pragma unroll
  for (int c = 0; c < kColumnTiles; ++c) {
    x_rows[c] = p.x.rows + x_row_at(8 * c + g) * p.x.stride + t * kLaneBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      x_groups[c][i] = p.x.groups + x_row_at(8 * c + 2 * t + i) * layout.num_groups;
  }

  float sums[kTiles / 2][kColumnTiles][4] = {};
  Dot dots[kTiles / 2][kColumnTiles][4] = {};
  // Ends a group: its products, scaled, to the sums. `at` is its scale's place in the unit.
  const auto end_group = [&](const std::byte* unit, int group, int at) {
    if (group >= layout.num_groups) return;  // beyond K
    float scale[kTiles];
    float min[kTiles];
    int32_t zero[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const std::byte* of = unit + tile * layout.unit_bytes;
      zero[tile] = group_zero(layout, of, g, at);
      scale[tile] = group_scale(layout, of, layout.scales_begin, layout.codes_begin, g, at);
      min[tile] = layout.has_min
                      ? group_scale(layout, of, layout.mins_begin, layout.min_codes_begin, g, at)
                      : 0.0f;
    }
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      if (8 * c >= num_columns) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        RoundedGroup x{};
        if constexpr (!kIsFloat) x = x_groups[c][i][group];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          Dot& dot = dots[tile / 2][c][tile % 2 * 2 + i];
          float& sum = sums[tile / 2][c][tile % 2 * 2 + i];
          if constexpr (kIsFloat) {
            sum = v_fma(scale[tile], dot, sum);
          } else {
            const auto product = static_cast<float>(dot - zero[tile] * x.sum);
            sum = sum + (scale[tile] * x.scale) * product;
            if (layout.has_min) sum = sum - min[tile] * (x.scale * static_cast<float>(x.sum));
          }
          dot = 0;
        }
      }
    }
  };

  // Products until the group at hand ends, which the unit's first has as its group.
  constexpr int kDepth = Kind::kGroups == GroupWidth::kHalf ? 16 : 32;
  const int group_products = layout.group_size / kDepth;
  int left = group_products;
  const auto end_product = [&](const std::byte* unit, int u, int k) {
    if constexpr (Kind::kGroups == GroupWidth::kOne) {
      if (!is_whole) end_group(unit, (u * kQuantizedUnit + k) / 32, k / 32);
    } else {
      if (--left > 0 || is_whole) return;
      left = group_products;
      const int first = u * kQuantizedUnit / layout.group_size;
      const int group = (u * kQuantizedUnit + k) / layout.group_size;
      end_group(unit, group, group - first);
    }
  };
  for (int u = begin; u < end; ++u) {
    wait_for_all_but<kStages - 2>();
    __syncwarp();  // all lanes' copies are there, and nobody reads the unit before any more
    if (u + kStages - 1 < end) load(u + kStages - 1);
    commit_copies();
    const std::byte* unit = ring + u % kStages * kTiles * layout.unit_bytes;
    LaneUnit<Kind::kIsBits, Kind::kCoding> weights[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      weights[tile].load(unit + tile * layout.unit_bytes, lane);
    uint4 x[kColumnTiles] = {};  // of two products of integers, or of one s of floats
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if (kIsFloat || s % 2 == 0) {
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c) {
          if (8 * c >= num_columns) continue;
          const auto* from =
              reinterpret_cast<const uint4*>(x_rows[c] + int64_t{u} * (4 * kLaneBytes));
          x[c] = from[kIsFloat ? s : s / 2];
        }
      }
      if constexpr (kIsFloat) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int m = 0; m < kTiles / 2; ++m) {
            const uint2 upper = weights[2 * m].floats(s, h, layout);
            const uint2 lower = weights[2 * m + 1].floats(s, h, layout);
#pragma unroll
            for (int c = 0; c < kColumnTiles; ++c) {
              if (8 * c >= num_columns) continue;
              multiply_add(dots[m][c], {upper.x, lower.x, upper.y, lower.y},
                           h == 0 ? x[c].x : x[c].z, h == 0 ? x[c].y : x[c].w);
            }
          }
        }
      } else {
        uint32_t a[kTiles / 2][4];
#pragma unroll
        for (int m = 0; m < kTiles / 2; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = weights[2 * m + i % 2].bytes(s, i / 2, layout);
        }
#pragma unroll
        for (int h = 0; h < (Kind::kGroups == GroupWidth::kHalf ? 2 : 1); ++h) {
#pragma unroll
          for (int c = 0; c < kColumnTiles; ++c) {
            if (8 * c >= num_columns) continue;
            const uint32_t b[2] = {s % 2 == 0 ? x[c].x : x[c].z, s % 2 == 0 ? x[c].y : x[c].w};
#pragma unroll
            for (int m = 0; m < kTiles / 2; ++m) {
              if constexpr (Kind::kGroups == GroupWidth::kHalf)
                multiply_integers(dots[m][c], a[m][2 * h], a[m][2 * h + 1], b[h]);
              else
                multiply_integers(dots[m][c], a[m], b[0], b[1]);
            }
          }
          if constexpr (Kind::kGroups == GroupWidth::kHalf) end_product(unit, u, 32 * s + 16 * h);
        }
      }
      if constexpr (Kind::kGroups != GroupWidth::kHalf) end_product(unit, u, 32 * s);
    }
  }

  // The last group of K may end after the last unit.
  if constexpr (Kind::kGroups != GroupWidth::kOne) {
    const bool is_cut = layout.num_groups * layout.group_size > layout.num_units * kQuantizedUnit;
    if (is_cut && !is_whole && begin < end && end == layout.num_units) {
      const int first = (end - 1) * kQuantizedUnit / layout.group_size;
      end_group(ring + (end - 1) % kStages * kTiles * layout.unit_bytes, layout.num_groups - 1,
                layout.num_groups - 1 - first);
    }
  }

  // The parts meet: integers of rows of one group, sums otherwise.
  __syncthreads();                                 // nobody reads units any more
  auto* parts = reinterpret_cast<float*>(shared);  // [W, kColumns, kRows]
#pragma unroll
  for (int m = 0; m < kTiles / 2; ++m) {
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * c + 2 * t + i % 2;
        const int row = 16 * m + i / 2 * 8 + g;
        float part = sums[m][c][i];
        if constexpr (kIsFloat) {
          if (is_whole) part = dots[m][c][i];
        } else {
          if (is_whole) part = v_from_bits(dots[m][c][i]);
        }
        parts[(warp * kColumns + column) * kRows + row] = part;
      }
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_columns * kRows; e += blockDim.x) {
    const int64_t n = first_tile * kQuantizedTile + e % kRows;
    const int64_t row = row_at(e / kRows);
    if (n >= p.out_features) continue;
    // What lies after the units of its tile.
    const std::byte* tail = weight + n / kQuantizedTile * layout.tile_bytes +
                            int64_t{layout.num_units} * layout.unit_bytes;
    if constexpr (Kind::kCoding == Coding::kFp8)
      if (layout.is_plain) tail = plain_scales + n / kQuantizedTile * kQuantizedTile * 4;
    const int at = static_cast<int>(n % kQuantizedTile);
    float value = 0.0f;
    if (!is_whole || kIsFloat)
      for (int w = 0; w < kQuantizedParts; ++w) value += parts[w * kColumns * kRows + e];
    if (is_whole) {
      const float scale = group_scale(layout, tail, layout.scales_begin, layout.codes_begin, at, 0);
      if constexpr (kIsFloat) {
        value = value * scale;
      } else {
        int32_t dot = 0;
        for (int w = 0; w < kQuantizedParts; ++w) dot += v_bits(parts[w * kColumns * kRows + e]);
        const RoundedGroup x = p.x.groups[x_row_at(e / kRows)];
        const int32_t zero = group_zero(layout, tail, at, 0);
        value = value + (scale * x.scale) * static_cast<float>(dot - zero * x.sum);
        if (layout.has_min) {
          const float min =
              group_scale(layout, tail, layout.mins_begin, layout.min_codes_begin, at, 0);
          value = value - min * (x.scale * static_cast<float>(x.sum));
        }
      }
    }
    if (layout.has_row_scale)
      value = value * reinterpret_cast<const float*>(tail + layout.row_scales_begin)[at];
    if (bias) value += bias[n];
    float& out = p.out.data[row * p.out.stride + n];
    out = p.accumulate ? value + out : value;
  }
}

inline constexpr int kFewTiles = 2;
inline constexpr int kFewColumnTiles = 1;
inline constexpr int kManyTiles = 4;
inline constexpr int kManyColumnTiles = 4;

template <class Kind, int kTiles, int kColumnTiles>
void prepare_quantized(const QuantizedLayout& layout) {
  check("cudaFuncSetAttribute of linear",
        cudaFuncSetAttribute(
            reinterpret_cast<const void*>(quantized_kernel<Kind, kTiles, kColumnTiles>),
            cudaFuncAttributeMaxDynamicSharedMemorySize,
            static_cast<int>(quantized_shared_bytes(layout, kTiles, 8 * kColumnTiles))));
}

template <class Kind, int kTiles, int kColumnTiles>
void launch_quantized(const QuantizedParams& p, cudaStream_t stream) {
  const int64_t down = p.groups.tasks ? p.groups.max_tasks : ceil_div(p.num_rows, 8 * kColumnTiles);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.out_features, int64_t{kTiles} * kQuantizedTile)),
                  static_cast<unsigned>(down));
  launch_early("linear", quantized_kernel<Kind, kTiles, kColumnTiles>, grid, 32 * kQuantizedParts,
               static_cast<size_t>(quantized_shared_bytes(p.layout, kTiles, 8 * kColumnTiles)),
               stream, p);
}

// Of one kind of weights, what a file of instances defines.
struct QuantizedKernels {
  void (*prepare)(const QuantizedLayout& layout);
  void (*run)(const QuantizedParams& params, cudaStream_t stream);
};
template <class Kind>
struct QuantizedKernelsOf {
  static void prepare(const QuantizedLayout& layout) {
    prepare_quantized<Kind, kFewTiles, kFewColumnTiles>(layout);
    prepare_quantized<Kind, kManyTiles, kManyColumnTiles>(layout);
  }
  static void run(const QuantizedParams& p, cudaStream_t stream) {
    if (p.rows_at_once <= 8 * kFewColumnTiles)
      launch_quantized<Kind, kFewTiles, kFewColumnTiles>(p, stream);
    else
      launch_quantized<Kind, kManyTiles, kManyColumnTiles>(p, stream);
  }
};

// Those of 2 and 3 bits, of 4, of 4 that are indices, of 5 and 6, of 8; null if there is none.
QuantizedKernels quarter_kernels(const QuantizedLayout& layout);
QuantizedKernels nibble_kernels(const QuantizedLayout& layout);
QuantizedKernels table_kernels(const QuantizedLayout& layout);
QuantizedKernels middle_kernels(const QuantizedLayout& layout);
QuantizedKernels byte_kernels(const QuantizedLayout& layout);

// Of the kinds of one coding and number of bits that there are, that of a layout.
template <int kBits, Coding kCoding, GroupWidth kWidth>
QuantizedKernels quantized_kernels() {
  using Of = QuantizedKernelsOf<QuantizedKind<kBits, kCoding, kWidth>>;
  return {&Of::prepare, &Of::run};
}

// Of the widths of groups that a number of bits and a coding have kernels for, the best for a
// layout: its own, or one that takes smaller products.
template <int kBits, Coding kCoding, GroupWidth... kWidths>
QuantizedKernels find_kernels(const QuantizedLayout& layout) {
  const auto find = [](GroupWidth width) {
    QuantizedKernels found{};
    ((width == kWidths ? (void)(found = quantized_kernels<kBits, kCoding, kWidths>()) : (void)0),
     ...);
    return found;
  };
  if (layout.bits != kBits || layout.coding != kCoding) return {};
  QuantizedKernels found = find(layout.width);
  if (!found.run && layout.width == GroupWidth::kOne) found = find(GroupWidth::kMany);
  return found.run ? found : find(GroupWidth::kHalf);
}

}  // namespace llmserve::cuda
