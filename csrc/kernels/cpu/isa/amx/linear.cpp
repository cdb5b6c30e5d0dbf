// Linear layers over bf16 weights by AMX: TDPBF16PS on tiles of 16 rows x 32 K and 32 K x 16
// columns, activations rounded to bf16 first.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::amx {
namespace {

#include "kernels/cpu/avx512.inc"
#include "kernels/cpu/bf16.inc"
#include "kernels/cpu/matmul.inc"
#include "kernels/cpu/tiles.inc"

constexpr int64_t kTileDepth = 32;
// Floats from a row of partial sums to the next: lines of neighbouring rows in different sets.
constexpr int64_t kPartialStride = kPanelBlock * kPanelWidth + kRowPadding;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// K of a block: one tile's worth of rows takes all of K, since it need not hold its weights.
int64_t depth_block(int64_t m, int64_t k) {
  return m <= kTileRows ? round_up(k, kTileDepth) : kDepthBlock;
}
// bf16 from a row of a copied block to the next: whole cache lines.
int64_t copy_stride(int64_t m, int64_t k) { return depth_block(m, k) + kTileDepth; }
// Few rows are their own tile; more are padded to whole ones.
int64_t tile_rows(int64_t m) { return min_of(m, kTileRows); }
int64_t padded_rows(int64_t m) { return round_up(min_of(m, kRowBlock), tile_rows(m)); }

int64_t scratch_floats(int64_t m, int64_t k) {
  return padded_rows(m) * (copy_stride(m, k) / 2 + kPartialStride);
}

// One block of a LinearPart: its rows, and K [k_begin, k_begin + k_count).
struct TileBlock {
  const LinearPart* part;
  const uint16_t* a;  // rows padded with zeros to whole tiles, K too
  int64_t lda;
  int64_t row, rows, tile_rows;
  int64_t k_begin, k_count;
  float* partial;  // [padded rows, kPartialStride]
  int64_t first_panel;
  bool is_first, is_last;

  // One step of R x C products: 2 x 2 where there are rows, since each tile loaded is used twice; 1
  // x 4 otherwise. Four sums hide the latency of the products.
  template <int R, int C>
  static inline void step(const uint16_t* x, int64_t lda, int64_t tile_rows,
                          const void* const (&b)[C]) {
    const int64_t stride = lda * 2;
    _tile_loadd(4, x, stride);
    _tile_loadd(6, b[0], kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (R == 2) {
      _tile_loadd(5, x + tile_rows * lda, stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (C > 1) {
      _tile_loadd(7, b[1], kTileRowBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R == 2 && C == 2) _tile_dpbf16ps(3, 5, 7);
    if constexpr (C == 4) {
      _tile_loadd(6, b[2], kTileRowBytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, b[3], kTileRowBytes);
      _tile_dpbf16ps(3, 4, 7);
    }
  }

  template <int R, int C>
  inline void load_sums(const float* kept) const {
    constexpr int64_t stride = kPartialStride * sizeof(float);
    if (is_first) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      return;
    }
    _tile_loadd(0, kept, stride);
    if constexpr (C > 1) _tile_loadd(1, kept + kPanelWidth, stride);
    if constexpr (C == 4) {
      _tile_loadd(2, kept + 2 * kPanelWidth, stride);
      _tile_loadd(3, kept + 3 * kPanelWidth, stride);
    }
    if constexpr (R == 2) _tile_loadd(2, kept + tile_rows * kPartialStride, stride);
    if constexpr (R == 2 && C == 2)
      _tile_loadd(3, kept + tile_rows * kPartialStride + kPanelWidth, stride);
  }

  template <int R, int C>
  inline void store_sums(float* kept) const {
    constexpr int64_t stride = kPartialStride * sizeof(float);
    _tile_stored(0, kept, stride);
    if constexpr (C > 1) _tile_stored(1, kept + kPanelWidth, stride);
    if constexpr (C == 4) {
      _tile_stored(2, kept + 2 * kPanelWidth, stride);
      _tile_stored(3, kept + 3 * kPanelWidth, stride);
    }
    if constexpr (R == 2) _tile_stored(2, kept + tile_rows * kPartialStride, stride);
    if constexpr (R == 2 && C == 2)
      _tile_stored(3, kept + tile_rows * kPartialStride + kPanelWidth, stride);
  }

  // R tiles of rows from `tile_row` on by C panels.
  template <int R, int C>
  inline void run_tiles(int64_t tile_row, int64_t panel) const {
    const int64_t stride = (part->k + 1) / 2 * 2 * kPanelWidth;
    const uint16_t* b = (const uint16_t*)part->weight + panel * stride + k_begin * kPanelWidth;
    const uint16_t* x = a + tile_row * lda;
    float* kept = partial + tile_row * kPartialStride + (panel - first_panel) * kPanelWidth;
    load_sums<R, C>(kept);
    const void* tiles[C];
    int64_t k = 0;
    for (; k + kTileDepth <= k_count; k += kTileDepth) {
      for (int c = 0; c < C; ++c) tiles[c] = b + c * stride + k * kPanelWidth;
      if (tile_row == 0) prefetch<C>(tiles);
      step<R, C>(x + k, lda, tile_rows, tiles);
    }
    if (k < k_count) {
      PaddedTile padded[C];
      for (int c = 0; c < C; ++c)
        tiles[c] =
            padded[c].fill(b + c * stride + k * kPanelWidth, (k_count - k) * kPanelWidth * 2);
      step<R, C>(x + k, lda, tile_rows, tiles);
    }
    store_sums<R, C>(kept);
    if (!is_last) return;
    for (int64_t r = 0; r < min_of(R * tile_rows, rows - tile_row); ++r)
      for (int c = 0; c < C; ++c)
        finish(*part, row + tile_row + r, (panel + c) * kPanelWidth,
               v_load(kept + r * kPartialStride + c * kPanelWidth));
  }

  // The first rows read the panels from memory.
  template <int C>
  static inline void prefetch(const void* const (&tiles)[C]) {
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 16
      for (int64_t i = 0; i < kTileBytes; i += 64)
        __builtin_prefetch((const char*)tiles[c] + kPrefetchBytes / C + i);
  }

  template <int C>
  inline int64_t run_panels(int64_t panel, int64_t end) const {
    for (; panel + C <= end; panel += C) {
      int64_t r = 0;
      if constexpr (C <= 2)
        for (; r + tile_rows < rows; r += 2 * tile_rows) run_tiles<2, C>(r, panel);
      if (r < rows) run_tiles<1, C>(r, panel);
    }
    return panel;
  }

  void run(int64_t panel, int64_t end) const {
    if (rows <= tile_rows) panel = run_panels<4>(panel, end);
    panel = run_panels<2>(panel, end);
    run_panels<1>(panel, end);
  }
};

// x rounded, and zeros up to the tile's K.
void copy_padded(uint16_t* to, const float* from, int64_t count) {
  round_row(from, count, to);
  const int64_t written = (count + 1) / 2 * 2;
  memset(to + written, 0, (size_t)(round_up(count, kTileDepth) - written) * sizeof(uint16_t));
}

// Blocks of panels, rows and K, as linear.inc has them.
void linear(const LinearPart* p) {
  const int64_t max_depth = depth_block(p->m, p->k);
  const int64_t lda = copy_stride(p->m, p->k);
  uint16_t* copy = (uint16_t*)p->scratch;
  float* partial = p->scratch + padded_rows(p->m) * lda / 2;
  configure_tiles(tile_rows(p->m), kTileRowBytes);
  for (int64_t panel = p->panel_begin; panel < p->panel_end; panel += kPanelBlock) {
    for (int64_t row = 0; row < p->m; row += kRowBlock) {
      for (int64_t k = 0; k < p->k; k += max_depth) {
        const int64_t depth = min_of(max_depth, p->k - k);
        const int64_t rows = min_of(kRowBlock, p->m - row);
        for (int64_t r = 0; r < rows; ++r)
          copy_padded(copy + r * lda, (const float*)p->x + (row + r) * p->x_stride + k, depth);
        const int64_t padding = round_up(rows, tile_rows(p->m)) - rows;
        memset(copy + rows * lda, 0, (size_t)(padding * lda) * sizeof(uint16_t));
        written(copy);
        const TileBlock block{.part = p,
                              .a = copy,
                              .lda = lda,
                              .row = row,
                              .rows = rows,
                              .tile_rows = tile_rows(p->m),
                              .k_begin = k,
                              .k_count = (depth + 1) / 2 * 2,
                              .partial = partial,
                              .first_panel = panel,
                              .is_first = k == 0,
                              .is_last = k + depth == p->k};
        block.run(panel, min_of(panel + kPanelBlock, p->panel_end));
      }
    }
  }
  _tile_release();
}

}  // namespace

constexpr LinearKernel kLinear = {nullptr, scratch_floats, linear};

}  // namespace llmserve::cpu::amx
