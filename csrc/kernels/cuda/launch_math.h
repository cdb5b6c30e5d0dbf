// Launch parameters as functions of shapes: plain C++, tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace llmserve::cuda {

inline constexpr int64_t kWarpSize = 32;
// Limits of every GPU since compute capability 3.0.
inline constexpr int64_t kMaxThreads = 1024;       // a block
inline constexpr int64_t kMaxGridX = 2147483647;   // blocks along x
inline constexpr int64_t kMaxGridYZ = 65535;       // blocks along y or z
inline constexpr int64_t kMaxSharedBytes = 49152;  // a block, unless it asks for more

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Threads for a row of `width` elements: whole warps, at most `max_threads`. Of the width alone, so
// that a row is summed in the same order whatever the other rows are.
constexpr int row_threads(int64_t width, int64_t max_threads = 256) {
  const int64_t warps = std::max<int64_t>(1, ceil_div(width, kWarpSize));
  return static_cast<int>(std::min(warps * kWarpSize, max_threads));
}

// Of a row whose threads take fours of neighbours (fours.cuh).
inline constexpr int kFourThreads = 256;
constexpr int four_threads(int64_t width) { return row_threads(ceil_div(width, 4), kFourThreads); }
// Fours that each of these threads then keeps in registers: 1, 2, 4 or 8, which are 32 floats; 0 if
// it would be more.
constexpr int held_fours(int64_t width) {
  const int64_t each = ceil_div(width, int64_t{4} * four_threads(width));
  return each > 8 ? 0 : each > 4 ? 8 : each > 2 ? 4 : static_cast<int>(each);
}

// Of a row whose squares are summed, by whichever kernel: the order of the sum follows from it.
constexpr int rms_threads(int64_t width) { return four_threads(width); }

// Blocks for n independent elements of a grid-stride loop: enough to fill any GPU, and no more.
constexpr int elementwise_blocks(int64_t n, int64_t threads) {
  constexpr int64_t kEnough = 4096;
  return static_cast<int>(std::clamp<int64_t>(ceil_div(n, threads), 1, kEnough));
}

// A tile of the plain matrix product: rows of x by rows of the weight.
struct GemmTile {
  int rows;
  int columns;
};
// Few rows: narrow tiles, so that more blocks share the reading of the weight. Each output is the
// same chain of multiply-adds in either, so that the choice does not change a bit.
inline constexpr GemmTile kSmallTile{8, 32};
inline constexpr GemmTile kLargeTile{64, 64};
inline constexpr int64_t kSmallTileMaxRows = 8;

constexpr GemmTile gemm_tile(int64_t rows) {
  return rows <= kSmallTileMaxRows ? kSmallTile : kLargeTile;
}
// Rows along y are few enough for the grid: kMaxGridYZ * 64 rows are 4 million tokens.
constexpr int64_t gemm_blocks_x(int64_t columns, GemmTile tile) {
  return ceil_div(columns, tile.columns);
}
constexpr int64_t gemm_blocks_y(int64_t rows, GemmTile tile) { return ceil_div(rows, tile.rows); }

// The product by tensor cores (mma_linear.cu). A block makes rows x columns outputs, a warp
// warp_rows x warp_columns of them, and K goes by in slices of `depth`, `stages` - 1 of which are
// on their way. An output is one chain of mma over K in order in all of them, so that the choice
// does not change a bit. Small: a decoding step, bound by the weight's bytes; 24 KB of it are on
// their way in each of the four blocks that an SM of an H100 holds. Large: 64 accumulators a lane,
// two blocks an SM.
struct MmaTile {
  int rows;
  int columns;
  int warp_rows;
  int warp_columns;
  int depth;
  int stages;

  constexpr int threads() const {
    return rows / warp_rows * (columns / warp_columns) * static_cast<int>(kWarpSize);
  }
  // From row to row in shared memory: an odd number of 16 bytes, as in tiled_stride.
  constexpr int stride() const { return depth + 8; }
  constexpr int64_t shared_bytes() const {
    return int64_t{stages} * (rows + columns) * stride() * 2;
  }
};
inline constexpr MmaTile kSmallMma{16, 32, 16, 16, 128, 4};
inline constexpr MmaTile kMediumMma{64, 64, 32, 32, 64, 4};
inline constexpr MmaTile kLargeMma{128, 128, 64, 32, 32, 4};

constexpr int64_t mma_blocks(int64_t rows, int64_t columns, const MmaTile& tile) {
  return ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns);
}
// Which of the three. Large tiles read least, if they are enough to give every SM of a large GPU
// (132 of them) work.
constexpr int mma_tile(int64_t rows, int64_t columns) {
  if (rows <= kSmallMma.rows) return 0;
  return mma_blocks(rows, columns, kLargeMma) >= 132 ? 2 : 1;
}

// Rows of a feed-forward layer at a time. The narrowest product of a small model, 1,024 columns, is
// 256 tiles of 128 x 128 then, two for each SM of a large GPU (132 of them); 512 rows would leave
// three quarters of it idle. The rows take 12 F bytes each: 0.7 GB at F = 14,336, of a model whose
// weights take 16 GB.
inline constexpr int64_t kMlpRows = 4096;

// What the algorithms of a library's products are chosen for: powers of two, since neighbouring M
// want the same one. The largest is beyond where it matters.
// Fewer rows are bound by the reading of the weight, which quantized_linear does as well.
inline constexpr int64_t kFp8MinRows = 65;
constexpr int64_t gemm_bucket(int64_t rows) {
  int64_t bucket = 16;
  while (bucket < rows && bucket < 8192) bucket *= 2;
  return bucket;
}

// The product of a few rows by tensor cores (mma_gemv.cu): a block has 16 rows of the weight, or 8
// of a narrow one, and its warps share K. A narrow weight needs many warps for few rows so that
// each SM of a large GPU (132 of them) has 30 KB and more on their way; of others, blocks of four
// warps are enough of them, and one wave for up to 6,336 rows. What is summed in which order
// follows from the weight alone.
inline constexpr int kMmaGemvMaxRows = 8;  // the columns of an mma
inline constexpr int kMmaGemvStep = 32;    // of K, a warp: 64 bytes of each row
constexpr bool mma_gemv_is_narrow(int64_t columns, bool is_gated) {
  return columns <= 2048 && !is_gated;
}
constexpr int mma_gemv_warps(int64_t columns, bool is_gated) {
  return mma_gemv_is_narrow(columns, is_gated) ? 16 : 4;
}
// Of 16 rows of the weight, a block: two where there are enough of them, so that the rows of x are
// read half as often. It changes no bit.
constexpr int mma_gemv_row_tiles(int64_t rows, int64_t columns) {
  return rows > 2 && columns >= 16384 ? 2 : 1;
}
constexpr int64_t mma_gemv_shared_bytes(int warps, int slots) {
  return int64_t{warps} * (slots + 1) * kMmaGemvMaxRows * static_cast<int64_t>(sizeof(float));
}

// The product of a few rows: blocks of four warps, each warp a few columns for all rows. Wide
// weights have work for every SM of a large GPU (132 of them, four blocks each) with four columns a
// warp, which reads x half as often; narrow ones are spread thinner. No bit depends on the choice.
inline constexpr int kGemvMaxRows = 8;
inline constexpr int kGemvWarps = 4;
inline constexpr int kGemvThreads = kGemvWarps * kWarpSize;

constexpr int gemv_columns(int64_t columns) { return columns >= 4 * kGemvWarps * 4 * 132 ? 4 : 2; }
constexpr int64_t gemv_blocks(int64_t columns, int columns_each) {
  return ceil_div(columns, int64_t{kGemvWarps} * columns_each);
}
// Up to so many rows, each block norms x for itself: the norm's own reading of x, from the L2, is
// an eighth of what a block with four columns a warp reads of an f32 weight. More rows get a launch
// of their own.
inline constexpr int kGemvNormMaxRows = 2;
// The rows that a kernel is made for: the least power of two.
constexpr int gemv_rows(int64_t rows) { return rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8; }

// Norm, rotation and cache of heads that registers do not hold (prepare_qkv.cu): a warp a head,
// which lies in shared memory meanwhile; blocks of four.
inline constexpr int kQkvWarps = 4;
constexpr int64_t qkv_blocks(int64_t heads) { return ceil_div(heads, kQkvWarps); }  // a token
constexpr int64_t qkv_shared_bytes(int64_t head_dim) {
  return kQkvWarps * head_dim * static_cast<int64_t>(sizeof(float));
}
// Wider heads take the ops one after another.
inline constexpr int64_t kQkvMaxWidth = 768;
static_assert(qkv_shared_bytes(kQkvMaxWidth) <= kMaxSharedBytes);

// Attention: one block a query head of a token; the query, the output and a tile's scores are in
// shared memory.
inline constexpr int kAttentionThreads = 128;
constexpr int64_t attention_shared_bytes(int64_t head_dim, int64_t value_dim, int64_t tile) {
  return (head_dim + value_dim + tile) * static_cast<int64_t>(sizeof(float));
}
// The widest heads that fit.
constexpr bool attention_fits(int64_t head_dim, int64_t value_dim, int64_t tile) {
  return attention_shared_bytes(head_dim, value_dim, tile) + 256 <= kMaxSharedBytes;
}

// Attention by tensor cores (tiled_attention.cuh). A warp has 16 rows, which an mma has, and walks
// units of 64 positions, whose 8 fragments of scores fit a lane's registers. A span is what one
// block reads in decoding; its result costs (D + 2) * 4 bytes a row to pass on, beside 4 * 256 * D
// bytes that it read.
inline constexpr int kTiledRows = 16;
inline constexpr int kTiledUnit = 64;
inline constexpr int kTiledSpan = 256;
static_assert(kTiledSpan % kTiledUnit == 0);

// Elements from row to row in shared memory: 16 bytes more than a row, which makes it an odd number
// of them, so that eight rows' pieces of 16 bytes lie in different banks.
constexpr int tiled_stride(int width) { return width + 8; }
// What stays in registers where those of the output (width / 2 a lane) leave room: decoding, the
// queries (width / 4); prompts, what was merged of the spans (width / 2), and the queries.
constexpr bool tiled_holds_query(int width) { return width <= 128; }
constexpr bool tiled_rows_hold_merged(int width) { return width <= 128; }
constexpr bool tiled_rows_hold_query(int width) { return width <= 80; }
// Warps of a block that works on prompts.
constexpr int tiled_warps(int width) { return width <= 128 ? 4 : 2; }
// Units of keys and values that such a block has: with two, one is on its way while the other is
// worked on; two blocks of 87 KB an SM at D = 128.
constexpr int tiled_stages(int width) { return width <= 128 ? 2 : 1; }

// A unit of keys and one of values: in bf16, and as codes.
constexpr int64_t tiled_unit_bytes(int width) {
  return int64_t{2} * kTiledUnit * tiled_stride(width) * 2;
}
constexpr int64_t tiled_code_bytes(int width) { return int64_t{2} * kTiledUnit * width; }

// Where codes are widened as they are multiplied: from row to row of them, and a unit of both.
constexpr int tiled_code_stride(int width) { return width + 16; }
constexpr int64_t tiled_held_code_bytes(int width) {
  return int64_t{2} * kTiledUnit * tiled_code_stride(width);
}

// Shared memory of a warp that works on a span, and of a block of them: 35 KB at D = 128, so that
// six decoding warps fit an SM of a data-centre GPU, each with three quarters of it on their way.
constexpr int64_t tiled_split_warp_bytes(int width, bool is_f8) {
  return is_f8 ? tiled_unit_bytes(width) / 2 + tiled_code_bytes(width) : tiled_unit_bytes(width);
}
constexpr int64_t tiled_query_bytes(int width) {
  return int64_t{kTiledRows} * tiled_stride(width) * 2;
}
constexpr int64_t tiled_split_bytes(int width, int warps, bool is_f8) {
  return warps * tiled_split_warp_bytes(width, is_f8) +
         (tiled_holds_query(width) ? 0 : tiled_query_bytes(width));
}
// Whether decoding's kernels may prepare queries, keys and values by themselves: of widths that
// models have.
// Whether decoding has kernels that widen codes as they multiply them: likewise.
constexpr bool has_code_kernel(int64_t width) { return width == 64 || width == 128; }
constexpr bool has_preparing_kernel(int64_t width) { return width == 64 || width == 128; }
// What the kernel has beside it, a maximum and a sum of each row and unit, at most.
inline constexpr int64_t kTiledStaticBytes = int64_t{2} * kTiledSpan / kTiledUnit * kTiledRows * 4;
// The same of a block that works on prompts.
constexpr int64_t tiled_rows_bytes(int width, bool is_f8) {
  const int64_t rows = int64_t{kTiledRows} * tiled_warps(width);
  const int64_t stages = tiled_stages(width);
  const int64_t tiles = is_f8 ? tiled_unit_bytes(width) + stages * tiled_code_bytes(width)
                              : stages * tiled_unit_bytes(width);
  const int64_t query = tiled_rows_hold_query(width) ? 0 : rows * tiled_stride(width) * 2;
  return tiles + query + (tiled_rows_hold_merged(width) ? 0 : rows * width * 4);
}
constexpr bool has_tiled_kernel(int64_t width) {
  return width == 64 || width == 80 || width == 96 || width == 128 || width == 256;
}
// Whether a GPU whose blocks may have `shared_bytes` can run the kernels of a width that it cannot
// do without, of every kind of cache.
constexpr bool tiled_fits(int64_t width, int64_t shared_bytes) {
  if (!has_tiled_kernel(width)) return false;
  const int w = static_cast<int>(width);
  return std::max({tiled_split_bytes(w, 1, false), tiled_split_bytes(w, 1, true),
                   tiled_rows_bytes(w, false), tiled_rows_bytes(w, true)}) +
             kTiledStaticBytes <=
         shared_bytes;
}
// Decoding has a warp for each unit, not one for a span, where so few blocks would leave a large
// GPU (132 SMs, a block of 139 KB each at D = 128) waiting for single warps. It changes no bit.
constexpr bool tiled_is_wide(int64_t blocks) { return blocks <= 2 * 132; }
constexpr bool has_wide_kernel(int width) { return width <= 128; }

// Attention of prompts by wgmma (wgmma_attention.cu): blocks of 128 rows, 64 to a warpgroup that
// computes, and tiles of 128 positions, two of keys and two of values: 161 KB at D = 128.
inline constexpr int kWgmmaRows = 128;
inline constexpr int kWgmmaTile = 128;
inline constexpr int kWgmmaStages = 2;
inline constexpr int kWgmmaThreads = 384;  // with the warpgroup that copies
constexpr bool has_wgmma_kernel(int64_t width) { return width == 64 || width == 128; }
constexpr int64_t wgmma_bytes(int width) {
  return 1024 + int64_t{kWgmmaRows + 2 * kWgmmaStages * kWgmmaTile} * width * 2;
}
// Shorter sequences would leave most of a block's rows empty; and those of up to eight tokens,
// which a step that guesses runs, must have the bits of decoding.
constexpr int64_t wgmma_from_rows(int64_t group) {
  return std::max<int64_t>(kWgmmaRows, (8 + 1) * group);
}

// Spans that a warp takes one after another where decoding has a warp for a span: fewer begin and
// end, and those that take all of a sequence pass nothing on. kEnough leaves a large GPU (132 SMs)
// four warps an SM, whose copies on their way are more than what the memory's rate takes. It
// changes no bit.
enum class DecodeSpans { kOne, kTwo, kEnough, kAll };
constexpr int64_t tiled_walk(DecodeSpans choice, int64_t spans, int64_t rows) {
  constexpr int64_t kEnoughBlocks = int64_t{4} * 132;
  const int64_t all = std::max<int64_t>(spans, 1);
  switch (choice) {
    case DecodeSpans::kOne:
      return 1;
    case DecodeSpans::kTwo:
      return std::min<int64_t>(all, 2);
    case DecodeSpans::kEnough:
      return std::clamp<int64_t>(spans * rows / kEnoughBlocks, 1, all);
    case DecodeSpans::kAll:
      return all;
  }
  return 1;
}

// Who merges spans that several blocks have made: the last of these blocks to be done, or a kernel
// behind. The former saves a launch, some 1.3 us and the way to full speed, for a fence and an
// atomic at the end of each block, some 1.4 us. Of a warp for each unit all blocks run at once, so
// that they wait side by side: kFew takes it there. Of a warp for each span one comes after
// another, and while a warp waits its place has no bytes on their way. It changes no bit.
enum class SpanMerge { kFew, kLast, kKernel };
constexpr bool merges_in_place(SpanMerge choice, bool is_wide) {
  return choice == SpanMerge::kLast || (choice == SpanMerge::kFew && is_wide);
}

// Who norms and turns queries and keys and writes the cache, where each sequence of a step has one
// token: attention itself, or a kernel in front. Attention does a query head again for each span, a
// warp's norm of some 0.3 us while keys and values are on their way, and saves a launch of some 2
// to 3 us. kFew takes it for steps whose kernels start early; with more rows and many spans a row a
// GPU has to say which is faster. It changes no bit.
enum class Preparation { kFew, kAttention, kKernel };
constexpr bool prepares_in_attention(Preparation choice, int64_t num_tokens) {
  return choice == Preparation::kAttention ||
         (choice == Preparation::kFew && num_tokens <= kMmaGemvMaxRows);
}

// What split rows pass on at a time, at most, but for one sequence whose context alone takes more:
// 250 sequences of 8,192 tokens with 8 KV heads of 128 and 4 query heads each pass on as much. More
// sequences than fit are split one part of them after another, which changes no bit.
inline constexpr int64_t kMaxPartialBytes = int64_t{128} << 20;

// Blocks along x: of the kernel whose blocks have a row tile each, of the one whose blocks have a
// span each (sequences of at most 16 rows), and of the one that merges what the latter made.
struct TiledPlan {
  int64_t row_tiles = 0;
  int64_t spans = 0;
  int64_t split_rows = 0;
  int64_t wgmma_tiles = 0;  // of the kernel that takes sequences of wgmma_rows and more
  int64_t wgmma_rows = std::numeric_limits<int64_t>::max();

  // A sequence of the step: `rows` query heads of tokens that read one KV head.
  constexpr void add(int64_t rows, int64_t kv_len, int width) {
    if (rows <= 0) return;
    if (rows <= kTiledRows) {
      spans = std::max(spans, ceil_div(kv_len, kTiledSpan));
      split_rows = std::max(split_rows, rows);
    } else if (rows >= wgmma_rows) {
      wgmma_tiles = std::max(wgmma_tiles, ceil_div(rows, kWgmmaRows));
    } else {
      row_tiles = std::max(row_tiles, ceil_div(rows, int64_t{kTiledRows} * tiled_warps(width)));
    }
  }
  // Results of spans that a sequence's split rows pass on: `width` of output, a maximum and a sum
  // each.
  constexpr int64_t num_partials(int64_t kv_heads) const {
    return spans > 1 ? kv_heads * spans * split_rows : 0;
  }
  constexpr int64_t sequence_bytes(int64_t kv_heads, int64_t width) const {
    return num_partials(kv_heads) * (width + 2) * 4;
  }
  // Of the step's, that are split together.
  constexpr int64_t sequences_at_once(int64_t sequences, int64_t kv_heads, int64_t width) const {
    const int64_t bytes = sequence_bytes(kv_heads, width);
    if (sequences * bytes <= kMaxPartialBytes) return sequences;
    return std::max<int64_t>(1, kMaxPartialBytes / bytes);
  }
};

// The bytes that sequences_at_once() of any step pass on, at most: of so many sequences, whose
// longest context is this and whose KV heads have `group` query heads each.
constexpr int64_t max_partial_bytes(int64_t sequences, int64_t context, int64_t kv_heads,
                                    int64_t group, int64_t width) {
  if (group > kTiledRows) return 0;
  const TiledPlan plan{.spans = ceil_div(context, kTiledSpan),
                       .split_rows = kTiledRows / group * group};
  const int64_t one = plan.sequence_bytes(kv_heads, width);
  return std::min(sequences * one, std::max(kMaxPartialBytes, one));
}

// Sampling: blocks of so many threads. As many share a row as make four for each SM of a large GPU
// (132 of them), but not so many that they would have less than some 4,096 elements each. What they
// find is merged by maxima and sums of integers, so that no bit depends on their number.
inline constexpr int kSampleThreads = 512;
struct RowPieces {
  int32_t count;
  int32_t size;  // elements, whole lines of 128 bytes
};
constexpr RowPieces row_pieces(int64_t rows, int64_t vocabulary) {
  constexpr int64_t kLeast = int64_t{8} * kSampleThreads;
  const int64_t count =
      std::clamp<int64_t>(ceil_div(int64_t{4} * 132, rows), 1, ceil_div(vocabulary, kLeast));
  const int64_t size = ceil_div(ceil_div(vocabulary, count), 32) * 32;
  return {static_cast<int32_t>(count), static_cast<int32_t>(size)};
}

// Whether what begins there, and again so many floats further on, can be read by 16 bytes.
inline bool is_aligned(const void* data, int64_t stride = 0) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 4 == 0;
}

// The largest power of two, at most 256, that divides an address or a stride in bytes.
constexpr uint32_t alignment_bytes(uint64_t value) {
  uint32_t alignment = 256;
  while (alignment > 1 && value % alignment != 0) alignment /= 2;
  return alignment;
}

}  // namespace llmserve::cuda
