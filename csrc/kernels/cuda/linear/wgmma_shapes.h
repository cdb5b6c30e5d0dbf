// How the product by wgmma (wgmma_product.cu) is cut: plain C++, tested without a GPU.
//
// K is cut into splits, of a number that follows from K alone. Within one an output is one chain of
// products of 16 of K in order; the splits' sums are added in order. All else, the tile, and how
// many blocks have the splits of a tile between them, changes no bit.
#pragma once

#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {

inline constexpr int kWgmmaDepth = 64;      // of K, a stage: 128 bytes of each row
inline constexpr int kWgmmaGroupRows = 64;  // rows of the weight, a warpgroup
inline constexpr int kWgmmaMaxSplits = 4;
// Few of 512 and more: a narrow weight of a small model, 1,024 x 2,048, then has 64 blocks; a wide
// one of any depth needs none.
constexpr int wgmma_splits(int64_t in_features) {
  return static_cast<int>(std::clamp<int64_t>(in_features / 512, 1, kWgmmaMaxSplits));
}
// Stages of a split but the last, which may have fewer.
constexpr int wgmma_split_steps(int64_t in_features) {
  return static_cast<int>(ceil_div(ceil_div(in_features, wgmma_splits(in_features)), kWgmmaDepth));
}

struct WgmmaForm {
  int groups;   // warpgroups that compute: 64 rows of the weight each
  int columns;  // rows of x
  int sharing;  // blocks that have a tile's splits between them: divides their number

  // Of shared memory, of which an SM has 227 KB: what is on its way in one block, or in two.
  constexpr int stage_bytes() const { return groups * kWgmmaGroupRows * 128 + columns * 128; }
  constexpr int blocks_per_sm() const { return groups == 2 && columns >= 64 ? 1 : 2; }
  constexpr int stages() const { return (blocks_per_sm() == 1 ? 192 : 108) * 1024 / stage_bytes(); }
  // Stages begin at a multiple of 1,024 bytes.
  constexpr int64_t shared_bytes() const { return 1024 + int64_t{stages()} * stage_bytes(); }
  // With a warp that copies; where sums take more registers than each of nine warps could have, a
  // warpgroup, which gives up its own.
  constexpr bool trades_registers() const { return columns == 128; }
  constexpr int threads() const { return groups * 128 + (trades_registers() ? 128 : 32); }
  constexpr int64_t tile_bytes() const {  // sums of a split
    return int64_t{groups} * kWgmmaGroupRows * columns * 4;
  }
  constexpr int64_t output_tiles(int64_t outputs) const {
    return ceil_div(outputs, int64_t{groups} * kWgmmaGroupRows);
  }
  constexpr int64_t row_tiles(int64_t rows) const { return ceil_div(rows, columns); }
  constexpr int64_t tiles(int64_t rows, int64_t outputs) const {
    return output_tiles(outputs) * row_tiles(rows);
  }
};

// Blocks that keep a large GPU (132 SMs) reading, with half of 100 KB on their way in each.
inline constexpr int64_t kWgmmaEnough = 120;

// The least sharing that makes enough blocks, or all.
constexpr int wgmma_sharing(int64_t tiles, int splits) {
  for (int sharing = 1; sharing < splits; ++sharing)
    if (splits % sharing == 0 && tiles * sharing >= kWgmmaEnough) return sharing;
  return splits;
}
// Two warpgroups read x from the L2 half as often: from 32 rows on that is what else would count,
// beside the weight. `outputs` are the weight's rows.
constexpr WgmmaForm wgmma_form(int64_t rows, int64_t outputs, int64_t in_features) {
  const int splits = wgmma_splits(in_features);
  const auto with = [&](int groups, int columns) {
    WgmmaForm form{groups, columns, 1};
    form.sharing = wgmma_sharing(form.tiles(rows, outputs), splits);
    return form;
  };
  const auto is_enough = [&](const WgmmaForm& form) {
    return form.tiles(rows, outputs) * splits >= kWgmmaEnough;
  };
  if (rows <= 8) return with(1, 8);
  if (rows <= 16) return with(1, 16);
  const int columns = rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
  const WgmmaForm tall = with(2, columns);
  return is_enough(tall) ? tall : with(1, std::min(columns, 64));
}

// Sums of splits that blocks pass on, at most: fewer than kWgmmaEnough tiles are shared.
inline constexpr int64_t kWgmmaPartialBytes =
    kWgmmaEnough * kWgmmaMaxSplits * WgmmaForm{2, 128, 1}.tile_bytes();
// Counters of those that have come, one a tile and warpgroup.
inline constexpr int64_t kWgmmaArrivals = 2 * kWgmmaEnough;

}  // namespace llmserve::cuda
