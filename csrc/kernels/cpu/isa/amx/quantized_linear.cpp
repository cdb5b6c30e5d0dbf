// Linear layers over integers by AMX, where there are a tile's worth of rows: TDPBSSD and TDPBSUD
// on tiles of 16 rows x 64 K and 64 K x 16 columns. Sums of integers are exact, so that fewer rows
// may take VNNI's way to the same bits.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::amx {
namespace {

#include "kernels/cpu/avx512.inc"
#include "kernels/cpu/matmul.inc"
#include "kernels/cpu/tiles.inc"

#include "kernels/cpu/bits_to_bytes.inc"
#include "kernels/cpu/group_scales.inc"

// Tiles of rows whose sums are held at once: four chains hide the latency of the products.
constexpr int64_t kTilesAtOnce = 4;
constexpr int64_t kPassRows = kTilesAtOnce * kTileRows;
// Rows of a block, at most two passes: their totals, 8 KiB, stay in the L1 while integers of less
// than 8 bits are unpacked once for all.
constexpr int64_t kMaxPasses = 2;
constexpr int64_t kBlockRows = kMaxPasses * kPassRows;
// Of the L2, 2 MiB from Sapphire to Granite Rapids, half is for a block's rows: 128 up to a K of
// 8,192, else 64. A quarter is for panels, which stay there while all blocks of rows pass them.
constexpr int64_t kRowsInCache = 1 << 20;
constexpr int64_t kPanelsInCache = 1 << 19;
// Groups below this go to VNNI: a product takes as long whatever its K. So do fewer bits than 4,
// whose groups are such.
constexpr int64_t kMinGroup = 32;
constexpr int kMinBits = 4;

// Sums of a panel's group over up to four tiles of rows, each of 16 rows from starts[t] on.
struct GroupSums {
  alignas(64) int32_t sums[kTilesAtOnce][kTileRows][kPanelWidth];

  template <int R, bool kIsSigned>
  void multiply(const int8_t* const (&x)[kTilesAtOnce], int64_t stride, const uint8_t* w,
                int64_t depth, int64_t step, Prefetching& ahead) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += step) {
      PaddedTile padded;
      const uint8_t* tile = w + k * kPanelWidth;
      if (depth - k < step) tile = padded.fill(tile, (depth - k + 3) / 4 * 4 * kPanelWidth);
      ahead.step<1>(0);
      add<R, kIsSigned>(x, stride, k, tile);
    }
    _tile_stored(0, sums[0], kTileRowBytes);
    if constexpr (R > 1) _tile_stored(1, sums[1], kTileRowBytes);
    if constexpr (R > 2) _tile_stored(2, sums[2], kTileRowBytes);
    if constexpr (R > 3) _tile_stored(3, sums[3], kTileRowBytes);
  }

 private:
  // The signed bytes of x by signed or unsigned bytes.
  template <int R, bool kIsSigned>
  static inline void add(const int8_t* const (&x)[kTilesAtOnce], int64_t stride, int64_t k,
                         const uint8_t* w) {
    _tile_loadd(6, w, kTileRowBytes);
    _tile_loadd(4, x[0] + k, stride);
    if constexpr (kIsSigned)
      _tile_dpbssd(0, 4, 6);
    else
      _tile_dpbsud(0, 4, 6);
    if constexpr (R > 1) {
      _tile_loadd(5, x[1] + k, stride);
      if constexpr (kIsSigned)
        _tile_dpbssd(1, 5, 6);
      else
        _tile_dpbsud(1, 5, 6);
    }
    if constexpr (R > 2) {
      _tile_loadd(4, x[2] + k, stride);
      if constexpr (kIsSigned)
        _tile_dpbssd(2, 4, 6);
      else
        _tile_dpbsud(2, 4, 6);
    }
    if constexpr (R > 3) {
      _tile_loadd(5, x[3] + k, stride);
      if constexpr (kIsSigned)
        _tile_dpbssd(3, 5, 6);
      else
        _tile_dpbsud(3, 5, 6);
    }
  }
};

// 4 bits of a group as bytes of [0, 15], in K quads: [depth / 4][16][4].
void unpack_nibbles(const uint8_t* from, int64_t depth, uint8_t* to) {
  for (int64_t k = 0; k < depth; k += 8, from += kTileRowBytes, to += 2 * kTileRowBytes) {
    const Quads both = q_load(from);
    _mm512_storeu_si512(to, q_low(both));
    _mm512_storeu_si512(to + kTileRowBytes, q_high(both));
  }
}

void unpack(const QuantizedLayout& layout, const uint8_t* from, int64_t depth, uint8_t* to) {
  if (layout.table != nullptr)
    look_up_all(layout.table, from, depth, to);
  else if (layout.bits == 4)
    unpack_nibbles(from, depth, to);
  else if (layout.bits == 5)
    unpack_joined<5>(from, depth, to);
  else
    unpack_joined<6>(from, depth, to);
}

// One panel by the rows [row, row + rows) of a part, of which the part has at least 16.
struct PanelBlock {
  const QuantizedPart* part;
  int64_t row, rows, panel;
  int64_t next_panel;  // what is prefetched, if the part has it

  // The last tile starts early enough to be whole; what it has in common with the one before is
  // the same integers again.
  int64_t tile_start(int64_t tile) const {
    return min_of(row + tile * kTileRows, part->m - kTileRows);
  }

  // totals [rows][16] += a group's sums, scaled: kernels/ops.h, LinearArgs.
  void add_group(const GroupSums& group, int64_t tile, int64_t num_tiles, int64_t g,
                 float* totals) const {
    const QuantizedLayout& layout = part->layout;
    const uint8_t* base = part->weight + panel * layout.panel_bytes;
    const Vec scale = load_group_scale(layout, base, g, kScale, 0);
    const Vec min = layout.has_min ? load_group_scale(layout, base, g, kMin, 0) : Vec{};
    const IVec zeros = layout.zero_bytes > 0 ? load_group_zeros(layout, base, g, 0)
                                             : u_to_int(u_splat((uint32_t)layout.zero_point));
    const int64_t end = min_of(rows, (tile + num_tiles) * kTileRows);
    for (int64_t r = tile * kTileRows; r < end; ++r) {
      const int64_t t = r / kTileRows;
      const IntegerGroup& x = part->groups[(row + r) * layout.num_groups + g];
      IVec sum;
      memcpy(&sum, group.sums[t - tile][row + r - tile_start(t)], sizeof(sum));
      sum = sum - zeros * u_to_int(u_splat((uint32_t)x.sum));
      Vec total = v_load(totals + r * kPanelWidth);
      total = total + (scale * v_splat(x.scale)) * v_to_float(sum);
      if (layout.has_min) total = total - min * v_splat(x.scaled_sum);
      v_store(totals + r * kPanelWidth, total);
    }
  }

  template <bool kIsSigned>
  void multiply_group(int64_t g, const uint8_t* w, int64_t step, Prefetching (&ahead)[kMaxPasses],
                      float* totals) const {
    const int64_t depth = part->layout.group_size;
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t tile = 0; tile < tiles; tile += kTilesAtOnce) {
      const int64_t count = min_of(kTilesAtOnce, tiles - tile);
      const int8_t* x[kTilesAtOnce];
      for (int64_t t = 0; t < kTilesAtOnce; ++t)
        x[t] = part->x + tile_start(tile + min_of(t, count - 1)) * part->x_stride + g * depth;
      GroupSums group;
      auto multiply = [&]<int R>() {
        group.multiply<R, kIsSigned>(x, part->x_stride, w, depth, step, ahead[tile / kTilesAtOnce]);
      };
      if (count == 1)
        multiply.template operator()<1>();
      else if (count == 2)
        multiply.template operator()<2>();
      else if (count == 3)
        multiply.template operator()<3>();
      else
        multiply.template operator()<4>();
      add_group(group, tile, count, g, totals);
    }
  }

  // A pass's share of the next panel's prefetching, which all passes over this one have.
  Prefetching share_of(int64_t pass, int64_t step) const {
    if (next_panel >= part->panel_end) return {};
    const QuantizedLayout& layout = part->layout;
    const int64_t steps = layout.num_groups * ((layout.group_size + step - 1) / step);
    return Prefetching::share(part->weight + next_panel * layout.panel_bytes, layout.panel_bytes,
                              steps, row / kPassRows + pass, (part->m + kPassRows - 1) / kPassRows);
  }

  void run(int64_t step) const {
    const QuantizedLayout& layout = part->layout;
    Prefetching ahead[kMaxPasses];
    for (int64_t pass = 0; pass < kMaxPasses; ++pass) ahead[pass] = share_of(pass, step);
    const uint8_t* base = part->weight + panel * layout.panel_bytes;
    const uint8_t* w = base;
    alignas(64) float totals[kBlockRows * kPanelWidth];
    memset(totals, 0, (size_t)(rows * kPanelWidth) * sizeof(float));
    for (int64_t g = 0; g < layout.num_groups; ++g) {
      if (layout.bits < 8) {
        alignas(64) uint8_t bytes[kMaxGroup * kPanelWidth];
        unpack(layout, w, layout.group_size, bytes);
        written(bytes);
        w += layout.group_size * layout.bits / 8 * kPanelWidth;
        if (layout.table != nullptr)
          multiply_group<true>(g, bytes, step, ahead, totals);
        else
          multiply_group<false>(g, bytes, step, ahead, totals);
      } else {
        multiply_group<true>(g, w, step, ahead, totals);
        w += (layout.group_size + 3) / 4 * 4 * kPanelWidth;
      }
    }
    const bool has_row_scales = layout.row_scales_begin > 0;
    const Vec scales = has_row_scales ? load_row_scales(layout, base, 0) : Vec{};
    for (int64_t r = 0; r < rows; ++r) {
      const Vec total = v_load(totals + r * kPanelWidth);
      finish(*part, row + r, panel * kPanelWidth, has_row_scales ? total * scales : total);
    }
  }

  // Of a group of less than 8 bits, unpacked on the stack.
  static constexpr int64_t kMaxGroup = 256;
};

}  // namespace

void quantized_linear(const QuantizedPart* part) {
  const QuantizedLayout& layout = part->layout;
  const bool has_room = layout.bits == 8 || layout.group_size <= PanelBlock::kMaxGroup;
  const bool has_tiles = layout.group_size >= kMinGroup && layout.bits >= kMinBits;
  const bool has_outliers = part->outliers != nullptr;
  if (part->m < kTileRows || !has_tiles || !has_room || has_outliers)
    return avx512_vnni::quantized_linear(part);
  const int64_t step = min_of(layout.group_size / 32 * 32, kTileRowBytes);
  const int64_t max_rows = part->x_stride * kBlockRows <= kRowsInCache ? kBlockRows : kPassRows;
  // Rows of one block need no panel again.
  const int64_t fit = part->m <= max_rows ? 1 : kPanelsInCache / layout.panel_bytes;
  const int64_t panels = fit > 1 ? fit : 1;
  configure_tiles(kTileRows, step);
  for (int64_t begin = part->panel_begin; begin < part->panel_end; begin += panels) {
    const int64_t end = min_of(begin + panels, part->panel_end);
    for (int64_t row = 0; row < part->m; row += max_rows)
      for (int64_t panel = begin; panel < end; ++panel)
        PanelBlock{part, row, min_of(max_rows, part->m - row), panel, panel + panels}.run(step);
  }
  _tile_release();
}

}  // namespace llmserve::cpu::amx
