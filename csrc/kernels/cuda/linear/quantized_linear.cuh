// The product of rows of integers with a weight of integers by tensor cores, one reading of the
// weight. The weight's rows are those of A of mma.m16n8k32, the rows of x the columns of B; sums of
// integers are exact in any order, and what is in floats has one order whatever M is.
#pragma once

#include "kernels/cuda/linear/quantized.h"
#include "kernels/cuda/mma.cuh"

namespace llmserve::cuda {

// What is made for it: a kernel for few rows (8 columns, 16 rows of the weight a warp) and one for
// more of them (32 and 32).
template <int kBits, bool kIsTable, GroupWidth kWidth>
struct QuantizedKind {
  static constexpr int kIsBits = kBits;
  static constexpr bool kHasTable = kIsTable;
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
template <int kBits, bool kIsTable>
struct LaneUnit {
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
  // Those of (s, h), a byte each.
  __device__ __forceinline__ uint32_t bytes(int s, int h, const uint32_t (&table)[4]) const {
    if constexpr (kBits == 8) return words[2 * s + h];
    if constexpr (kIsTable) {
      // Bits 0 to 2 of an index choose in both halves of the table, bit 3 between what they gave.
      const uint32_t index = words[s] >> 16 * h;
      const uint32_t low = __byte_perm(table[0], table[1], index & 0x7777u);
      const uint32_t high = __byte_perm(table[2], table[3], index & 0x7777u);
      return __byte_perm(low, high, 0x3210u | (index & 0x8888u) >> 1);
    }
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
__device__ __forceinline__ float scale_at(const std::byte* scales, int at, int num_bytes) {
  if (num_bytes == 2) return f16_to_float(reinterpret_cast<const uint16_t*>(scales)[at]);
  if (num_bytes == 4) return reinterpret_cast<const float*>(scales)[at];
  return v_from_bits(static_cast<int32_t>(scales[at]) << 23);
}
// Of row `row` of a tile, the scale or the minimum of group `at` of a unit, or of its only group.
__device__ __forceinline__ float group_scale(const QuantizedLayout& layout, const std::byte* unit,
                                             int scales_begin, int codes_begin, int row, int at) {
  const int place = row * layout.unit_groups + at;
  const float scale =
      scale_at(unit + scales_begin, layout.has_codes ? row : place, layout.scale_bytes);
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
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kColumns;
  const int num_columns =
      static_cast<int>(p.num_rows - first_row < kColumns ? p.num_rows - first_row : kColumns);

  // The warp's part, in steps of as many units as a group has.
  const int step =
      is_whole || layout.group_size <= kQuantizedUnit ? 1 : layout.group_size / kQuantizedUnit;
  const int num_steps = (layout.num_units + step - 1) / step;
  const auto part_begin = [&](int part) {
    const int begin = num_steps * part / kQuantizedParts * step;
    return begin < layout.num_units ? begin : layout.num_units;
  };
  const int begin = part_begin(warp);
  const int end = part_begin(warp + 1);

  std::byte* ring = shared + warp * kStages * kTiles * layout.unit_bytes;
  const auto load = [&](int u) {
    std::byte* to = ring + u % kStages * kTiles * layout.unit_bytes;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t at = first_tile + tile < last_tile ? first_tile + tile : last_tile;
      const std::byte* from = p.weight + at * layout.tile_bytes + int64_t{u} * layout.unit_bytes;
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

  const auto row_at = [&](int column) {
    return first_row + (column < num_columns ? column : num_columns - 1);
  };
  const int8_t* x_rows[kColumnTiles];
#pragma unroll
  for (int c = 0; c < kColumnTiles; ++c)
    x_rows[c] = p.x.q + row_at(8 * c + g) * p.x.stride + t * 32;

  float sums[kTiles / 2][kColumnTiles][4] = {};
  int32_t dots[kTiles / 2][kColumnTiles][4] = {};
  // Ends a group: its products, scaled, to the sums. `at` is its scale's place in the unit.
  const auto end_group = [&](const std::byte* unit, int group, int at) {
    if (is_whole || group >= layout.num_groups) return;  // at the end, or beyond K
    float scale[kTiles];
    float min[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const std::byte* of = unit + tile * layout.unit_bytes;
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
        const RoundedGroup x = p.x.groups[row_at(8 * c + 2 * t + i) * layout.num_groups + group];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          int32_t& dot = dots[tile / 2][c][tile % 2 * 2 + i];
          float& sum = sums[tile / 2][c][tile % 2 * 2 + i];
          const auto product = static_cast<float>(dot - layout.zero_point * x.sum);
          sum = sum + (scale[tile] * x.scale) * product;
          if (layout.has_min) sum = sum - min[tile] * (x.scale * static_cast<float>(x.sum));
          dot = 0;
        }
      }
    }
  };

  int left = layout.group_size / 32;  // products of the group at hand, of many
  for (int u = begin; u < end; ++u) {
    wait_for_all_but<kStages - 2>();
    __syncwarp();  // all lanes' copies are there, and nobody reads the unit before any more
    if (u + kStages - 1 < end) load(u + kStages - 1);
    commit_copies();
    const std::byte* unit = ring + u % kStages * kTiles * layout.unit_bytes;
    LaneUnit<Kind::kIsBits, Kind::kHasTable> weights[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      weights[tile].load(unit + tile * layout.unit_bytes, lane);
    uint4 x[kColumnTiles][2] = {};
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      if (8 * c >= num_columns) continue;
      const auto* from = reinterpret_cast<const uint4*>(x_rows[c] + int64_t{u} * kQuantizedUnit);
      x[c][0] = from[0];
      x[c][1] = from[1];
    }
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      uint32_t a[kTiles / 2][4];
#pragma unroll
      for (int m = 0; m < kTiles / 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = weights[2 * m + i % 2].bytes(s, i / 2, layout.table);
      }
#pragma unroll
      for (int h = 0; h < (Kind::kGroups == GroupWidth::kHalf ? 2 : 1); ++h) {
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c) {
          if (8 * c >= num_columns) continue;
          const uint4& four = x[c][s / 2];
          const uint32_t b[2] = {s % 2 == 0 ? four.x : four.z, s % 2 == 0 ? four.y : four.w};
#pragma unroll
          for (int m = 0; m < kTiles / 2; ++m) {
            if constexpr (Kind::kGroups == GroupWidth::kHalf)
              multiply_integers(dots[m][c], a[m][2 * h], a[m][2 * h + 1], b[h]);
            else
              multiply_integers(dots[m][c], a[m], b[0], b[1]);
          }
        }
        if constexpr (Kind::kGroups == GroupWidth::kHalf)
          end_group(unit, 8 * u + 2 * s + h, 2 * s + h);
      }
      if constexpr (Kind::kGroups == GroupWidth::kOne) end_group(unit, 4 * u + s, s);
      if constexpr (Kind::kGroups == GroupWidth::kMany) {
        if (--left > 0 || is_whole) continue;
        left = layout.group_size / 32;
        const int group = (4 * u + s) * 32 / layout.group_size;
        end_group(unit, group, group % layout.unit_groups);
      }
    }
  }

  // The last group of K may end before its last product.
  if constexpr (Kind::kGroups == GroupWidth::kMany) {
    if (end == layout.num_units && begin < end && left < layout.group_size / 32)
      end_group(ring + (end - 1) % kStages * kTiles * layout.unit_bytes, layout.num_groups - 1,
                (layout.num_groups - 1) % layout.unit_groups);
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
        parts[(warp * kColumns + column) * kRows + row] =
            is_whole ? v_from_bits(dots[m][c][i]) : sums[m][c][i];
      }
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_columns * kRows; e += blockDim.x) {
    const int64_t n = first_tile * kQuantizedTile + e % kRows;
    const int64_t row = first_row + e / kRows;
    if (n >= p.out_features) continue;
    float value = 0.0f;
    if (is_whole) {
      int32_t dot = 0;
      for (int w = 0; w < kQuantizedParts; ++w) dot += v_bits(parts[w * kColumns * kRows + e]);
      const RoundedGroup x = p.x.groups[row];
      const std::byte* scales = p.weight + n / kQuantizedTile * layout.tile_bytes +
                                int64_t{layout.num_units} * layout.unit_bytes;
      const int at = static_cast<int>(n % kQuantizedTile);
      const float scale =
          group_scale(layout, scales, layout.scales_begin, layout.codes_begin, at, 0);
      value = value + (scale * x.scale) * static_cast<float>(dot - layout.zero_point * x.sum);
      if (layout.has_min) {
        const float min =
            group_scale(layout, scales, layout.mins_begin, layout.min_codes_begin, at, 0);
        value = value - min * (x.scale * static_cast<float>(x.sum));
      }
    } else {
      for (int w = 0; w < kQuantizedParts; ++w) value += parts[w * kColumns * kRows + e];
    }
    if (p.bias) value += p.bias[n];
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
  const dim3 grid(static_cast<unsigned>(ceil_div(p.out_features, int64_t{kTiles} * kQuantizedTile)),
                  static_cast<unsigned>(ceil_div(p.num_rows, 8 * kColumnTiles)));
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
    if (p.num_rows <= 8 * kFewColumnTiles)
      launch_quantized<Kind, kFewTiles, kFewColumnTiles>(p, stream);
    else
      launch_quantized<Kind, kManyTiles, kManyColumnTiles>(p, stream);
  }
};

// Those of 2 and 3 bits, of 4, of 4 with a table, of 5, 6 and 8; null if there is none.
QuantizedKernels quarter_kernels(const QuantizedLayout& layout);
QuantizedKernels nibble_kernels(const QuantizedLayout& layout);
QuantizedKernels table_kernels(const QuantizedLayout& layout);
QuantizedKernels byte_kernels(const QuantizedLayout& layout);

template <int kBits, bool kIsTable, GroupWidth kWidth>
QuantizedKernels quantized_kernels() {
  using Of = QuantizedKernelsOf<QuantizedKind<kBits, kIsTable, kWidth>>;
  return {&Of::prepare, &Of::run};
}

}  // namespace llmserve::cuda
