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

// Few rows are a tile of their own.
int64_t tile_rows(int64_t m) { return min_of(m, kTileRows); }

int64_t scratch_floats(int64_t m, int64_t) {
  return round_up(min_of(m, kRowBlock), tile_rows(m)) * kPartialStride;
}

// One block of a LinearPart: the rows [row, row + rows) and K [k_begin, k_begin + k_count).
struct TileBlock {
  const LinearPart* part;
  int64_t row, rows, tile_rows;
  int64_t k_begin, k_count;  // of the weights' K, in pairs
  float* partial;            // [tiles * tile_rows, kPartialStride]: sums between blocks of K
  int64_t first_panel;
  bool is_first, is_last;

  int64_t num_tiles() const { return (rows + tile_rows - 1) / tile_rows; }
  // The last tile starts early enough to be whole: the rows that it has in common with the one
  // before get the same sums again.
  int64_t tile_start(int64_t tile) const {
    return min_of(row + tile * tile_rows, part->m - tile_rows);
  }
  const uint16_t* x(int64_t tile) const {
    return (const uint16_t*)part->x + tile_start(tile) * part->x_stride + k_begin;
  }
  float* sums_of(int64_t tile, int64_t panel) const {
    return partial + tile * tile_rows * kPartialStride + (panel - first_panel) * kPanelWidth;
  }
  // From a panel to the next.
  int64_t panel_elements() const { return (part->k + 1) / 2 * 2 * kPanelWidth; }
  int64_t panel_bytes() const { return panel_elements() * (int64_t)sizeof(uint16_t); }
  const uint16_t* weights(int64_t panel, int64_t k) const {
    return (const uint16_t*)part->weight + panel * panel_elements() + k * kPanelWidth;
  }

  // One step of R x C products: 2 x 2 where there are rows, since each tile loaded is used twice; 1
  // x 4 otherwise. Four sums hide the latency of the products.
  template <int R, int C>
  static inline void step(const uint16_t* const (&a)[R], int64_t stride,
                          const void* const (&b)[C]) {
    _tile_loadd(4, a[0], stride);
    _tile_loadd(6, b[0], kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (R == 2) {
      _tile_loadd(5, a[1], stride);
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

  // R tiles of rows from `tile` on by C panels, while what `ahead` says is prefetched.
  template <int R, int C>
  inline void run_tiles(int64_t tile, int64_t panel, Prefetching ahead) const {
    const uint16_t* b = weights(panel, k_begin);
    float* kept = sums_of(tile, panel);
    load_sums<R, C>(kept);
    const uint16_t* a[R];
    for (int r = 0; r < R; ++r) a[r] = x(tile + r);
    for (int64_t k = 0; k < k_count; k += kTileDepth) {
      PaddedTile padded[C];
      const void* tiles[C];
      for (int c = 0; c < C; ++c) {
        const uint16_t* from = b + c * panel_elements() + k * kPanelWidth;
        const int64_t depth = k_count - k;
        tiles[c] =
            depth >= kTileDepth ? (const void*)from : padded[c].fill(from, depth * kPanelWidth * 2);
      }
      ahead.step<C>(panel_bytes());
      step<R, C>(a, part->x_stride * 2, tiles);
      for (int r = 0; r < R; ++r) a[r] += kTileDepth;
    }
    store_sums<R, C>(kept);
    if (!is_last) return;
    for (int r = 0; r < R; ++r) finish_tile<C>(tile + r, panel);
  }

  // Writes the rows of a tile that the one before does not have.
  template <int C>
  void finish_tile(int64_t tile, int64_t panel) const {
    const float* kept = sums_of(tile, panel);
    const int64_t begin = row + tile * tile_rows;
    for (int64_t r = begin; r < min_of(begin + tile_rows, row + rows); ++r)
      for (int c = 0; c < C; ++c)
        finish(*part, r, (panel + c) * kPanelWidth,
               v_load(kept + (r - tile_start(tile)) * kPartialStride + c * kPanelWidth));
  }

  // The weights that the C panels from `panel` on are followed by: of the panels beside them, or of
  // the next block of K.
  template <int C>
  const uint16_t* weights_after(int64_t panel, int64_t end) const {
    if (panel + C < end) return weights(panel + C, k_begin);
    return is_last ? weights(panel + C, 0) : weights(first_panel, k_begin + k_count);
  }

  // All tiles of rows over C panels at a time, two in a pass where there are as many. A single pass
  // reads its weights from memory and prefetches what it needs soon, of the panels that come next
  // their heads; several share the prefetching of these panels.
  template <int C>
  int64_t run_panels(int64_t panel, int64_t end) const {
    constexpr int64_t kLinesAhead = kPrefetchBytes / C / kTileRowBytes;
    const int64_t tiles = num_tiles();
    const int64_t passes = (tiles + 1) / 2;
    const int64_t steps = (k_count + kTileDepth - 1) / kTileDepth;
    for (; panel + C <= end; panel += C) {
      const uint16_t* next = weights_after<C>(panel, end);
      if (passes == 1) Prefetching{(const char*)next, kLinesAhead}.step<C>(panel_bytes());
      for (int64_t pass = 0; pass < passes; ++pass) {
        const auto ahead =
            passes == 1
                ? Prefetching{(const char*)weights(panel, k_begin) + kPrefetchBytes / C, kTileRows}
                : Prefetching::share(next, k_count * kPanelWidth * 2, steps, pass, passes);
        if constexpr (C <= 2) {
          if (2 * pass + 1 < tiles) {
            run_tiles<2, C>(2 * pass, panel, ahead);
            continue;
          }
        }
        run_tiles<1, C>(2 * pass, panel, ahead);
      }
    }
    return panel;
  }

  void run(int64_t panel, int64_t end) const {
    if (num_tiles() == 1) panel = run_panels<4>(panel, end);
    panel = run_panels<2>(panel, end);
    run_panels<1>(panel, end);
  }
};

// Blocks of panels, rows and K: 512 K of two panels, 32 KiB, stay in the L1 (48 KiB) while 96 rows,
// 96 KiB of the L2, pass them. One tile's worth of rows takes all of K, since it need not hold its
// weights.
void linear(const LinearPart* p) {
  const int64_t max_depth = p->m <= kTileRows ? p->k : kDepthBlock;
  configure_tiles(tile_rows(p->m), kTileRowBytes);
  for (int64_t panel = p->panel_begin; panel < p->panel_end; panel += kPanelBlock) {
    for (int64_t row = 0; row < p->m; row += kRowBlock) {
      for (int64_t k = 0; k < p->k; k += max_depth) {
        const int64_t depth = min_of(max_depth, p->k - k);
        const TileBlock block{.part = p,
                              .row = row,
                              .rows = min_of(kRowBlock, p->m - row),
                              .tile_rows = tile_rows(p->m),
                              .k_begin = k,
                              .k_count = (depth + 1) / 2 * 2,
                              .partial = p->scratch,
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

constexpr LinearKernel kLinear = {round_row, scratch_floats, linear};

}  // namespace llmserve::cpu::amx
