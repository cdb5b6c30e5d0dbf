// Attention of prompts over caches in bf16 by wgmma, on sm_90a: what rows_kernel of
// tiled_attention.cuh does elsewhere, in an order of its own.
//
// A block has 128 rows and walks the KV in tiles of 128 positions. Two warpgroups have 64 rows each
// and take turns at the tensor cores: while one multiplies, the other makes weights of its scores.
// Within a warpgroup, too, a tile's scores are on their way while the values of the tile before are
// weighed. A third warpgroup copies keys and values to shared memory, row by row, since a page may
// be shorter than a tile: each of its warps fills one of four buffers. Shah et al. 2024
// (FlashAttention-3), sections 3.1 and 3.2.
//
// Tiles are anchored at position 0, and one of which a row sees nothing leaves it as it is. So a
// row's bits depend on its own tokens alone, not on how a prompt is cut or who is beside it; but
// they are not those of tiled_attention.cuh.
#include "kernels/cuda/attention/tiled_rows.cuh"
#include "kernels/cuda/attention/wgmma_kernels.h"
#include "kernels/cuda/fours.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace llmserve::cuda {
namespace {

constexpr int kTile = kWgmmaTile;
constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kGroupRows = 64;
constexpr int kConsumers = kWgmmaRows / kGroupRows;
constexpr int kThreads = kGroupThreads * (kConsumers + 1);
static_assert(kConsumers == 2 && kWgmmaStages == 2 && kThreads == kWgmmaThreads);
constexpr int kAllConsumers = kConsumers * kGroupThreads;
// Of 168 that each of 384 threads begins with: whoever copies needs few, a row's scores, output and
// weights are 64 + 64 + 32.
constexpr int kCopyRegisters = 56;
constexpr int kRowRegisters = 224;
// Barriers of some of the block's threads: turns of either warpgroup, and each by itself.
constexpr int kTurnBarrier = 1;
constexpr int kGroupBarrier = 3;

// Phases of the buffers: keys of even and odd tiles, values likewise.
struct Phases {
  uint64_t full[4];   // a warp that copies has filled it
  uint64_t empty[4];  // all warps that read it have
};
__device__ __forceinline__ int buffer_of(bool is_value, int tile) {
  return (is_value ? kWgmmaStages : 0) + tile % kWgmmaStages;
}

// A matrix of kRows rows of D as blocks of 64 columns.
template <int kRows>
constexpr int kBlockBytes = kRows * 128;
template <int kDim>
constexpr int kBufferBytes = kDim / 64 * kBlockBytes<kTile>;

// One warp: every second tile's keys, or values, to the buffer that is its own. Rows that nobody
// sees are zeros.
template <int kDim>
__device__ __forceinline__ void copy_tiles(const AttentionParams& p, const RowTile& rows,
                                           int first_tile, int num_tiles, std::byte* buffers,
                                           Phases& phases) {
  constexpr int kPieces = kDim / 8;          // of 16 bytes, a row
  constexpr int kRowsAtOnce = 32 / kPieces;  // by a warp
  constexpr int kLaneRows = kTile / 32;      // positions that a lane finds
  const int lane = threadIdx.x % 32;
  const int buffer = threadIdx.x / 32 % 4;
  const CachePart& part = buffer < kWgmmaStages ? p.keys : p.values;
  const int block_rows = static_cast<int>(part.head_stride / kDim);
  const auto block_size = static_cast<int>(part.block_size);
  const int piece = lane % kPieces;
  const int block = piece / 8;
  const auto* from = static_cast<const std::byte*>(part.data) + piece * 16;
  std::byte* to = buffers + buffer * kBufferBytes<kDim> + block * kBlockBytes<kTile>;
  for (int tile = buffer % kWgmmaStages, fill = 0; tile < num_tiles; tile += kWgmmaStages, ++fill) {
    const int begin = (first_tile + tile) * kTile;
    int found[kLaneRows];  // rows of the pool, -1 for none
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int position = begin + i * 32 + lane;
      const int32_t in_pool = find_block(p, rows, position);
      found[i] =
          in_pool < 0
              ? -1
              : (in_pool * static_cast<int>(part.num_heads) + static_cast<int>(rows.kv_head)) *
                        block_rows +
                    position % block_size;
    }
    await_phase(&phases.empty[buffer], (fill + 1) % 2);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll
      for (int at = 0; at < 32; at += kRowsAtOnce) {
        const int row = at + lane / kPieces;
        const int in_pool = __shfl_sync(kAllLanes, found[i], row);
        const int64_t offset = in_pool < 0 ? 0 : int64_t{in_pool} * (kDim * 2);
        copy_async(to + swizzled(i * 32 + row, piece % 8), from + offset, in_pool >= 0);
      }
    }
    wait_for_copies();
    show_to_products();
    arrive(&phases.full[buffer]);
  }
}

// A warpgroup's 64 queries as bf16; zeros beyond the last row. All of a thread's loads are on their
// way at once.
template <int kDim>
__device__ __forceinline__ void load_group_queries(const AttentionParams& p, const RowTile& rows,
                                                   int64_t group_row, std::byte* to) {
  constexpr int kFours = kGroupRows * kDim / 4 / kGroupThreads;  // of a thread
  const int64_t first_token = p.query_starts[rows.sequence];
  const int thread = threadIdx.x % kGroupThreads;
  Four fours[kFours];
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int e = i * kGroupThreads + thread;
    const int r = static_cast<int>(group_row) + e / (kDim / 4);
    fours[i] = Four{};
    if (r >= rows.num_rows) continue;
    const int64_t head = rows.kv_head * rows.group + r % rows.group;
    const float* from =
        p.q + (first_token + r / rows.group) * p.q_token_stride + head * p.q_head_stride;
    fours[i] = load_four<true>(from, e % (kDim / 4) * 4, kDim);
  }
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int e = i * kGroupThreads + thread;
    const int column = e % (kDim / 4) * 4;
    auto* at =
        reinterpret_cast<uint32_t*>(to + column / 64 * kBlockBytes<kGroupRows> +
                                    swizzled(e / (kDim / 4), column % 64 / 8) + column % 8 * 2);
    at[0] = pack_bf16(fours[i].at[0], fours[i].at[1]);
    at[1] = pack_bf16(fours[i].at[2], fours[i].at[3]);
  }
}

// A warpgroup's scores of a tile: asked for, not waited for.
template <int kDim>
__device__ __forceinline__ void ask_for_scores(float (&s)[64], uint64_t queries, uint64_t keys) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const int block = step / 4;
    multiply_rows(s, advance(queries, block * kBlockBytes<kGroupRows> + step % 4 * 32),
                  advance(keys, block * kBlockBytes<kTile> + step % 4 * 32), step > 0);
  }
  commit_products();
}

// Likewise what a tile's values come to.
template <int kDim>
__device__ __forceinline__ void ask_for_values(float (&o)[kDim / 2],
                                               const uint32_t (&weights)[8][4], uint64_t values,
                                               bool accumulates) {
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
    multiply_columns(o, weights[step], advance(values, step * 16 * 128), accumulates || step > 0);
  }
  commit_products();
}

// -inf where a lane's two rows do not see the position. With a soft cap, scores as powers of 2.
__device__ __forceinline__ void cap_and_mask(float (&s)[64], const AttentionParams& p,
                                             const Sight& sight, int begin) {
  if (p.soft_cap > 0) {
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = p.soft_cap * v_tanh(s[i] * p.scale / p.soft_cap) * kLog2E;
  }
  if (begin >= sight.all_first && begin + kTile - 1 <= sight.all_last) return;  // the whole warp
  const int position = begin + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int at = position + i / 4 * 8 + i % 2;
    const int g = i / 2 % 2;
    if (at < sight.first[g] || at > sight.last[g]) s[i] = -INFINITY;
  }
}

// A lane's two rows so far: the largest score, and the lane's share of the sum of weights.
struct Softmax {
  float m[2];
  float sum[2];
  float scale[2];  // of what was summed before the last tile

  // Scores to weights relative to the rows' maxima. NaN is passed over by a maximum: its weight has
  // it all the same. Four chains of maxima and of sums a row, so that none waits for itself.
  __device__ __forceinline__ void take(float (&s)[64], float unit) {
    const auto score = [&s](int g, int i) -> float& { return s[i / 2 * 4 + 2 * g + i % 2]; };
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      float largest[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[i] = score(g, i);
#pragma unroll
      for (int i = 4; i < 32; ++i) largest[i % 4] = fmaxf(largest[i % 4], score(g, i));
      float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
      all = fmaxf(all, __shfl_xor_sync(kAllLanes, all, 1));
      all = fmaxf(m[g], fmaxf(all, __shfl_xor_sync(kAllLanes, all, 2)));
      const float base = finite_or_zero(all) * unit;
      scale[g] = fast_exp2(m[g] * unit - base);  // 1 where the maximum stays, rounded alike
      m[g] = all;
      float added[4] = {};
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        score(g, i) = fast_exp2(v_fma(score(g, i), unit, -base));
        added[i % 4] += score(g, i);
      }
      sum[g] = v_fma(sum[g], scale[g], (added[0] + added[1]) + (added[2] + added[3]));
    }
  }
};

// Weights as fragments of A of 16 positions each.
__device__ __forceinline__ void pack_weights(const float (&s)[64], uint32_t (&weights)[8][4]) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = step * 8 + i / 2 * 4 + i % 2 * 2;
      weights[step][i] = pack_bf16(s[at], s[at + 1]);
    }
  }
}

// A warpgroup that computes. `turn` is its number.
template <int kDim>
__device__ __forceinline__ void attend(const AttentionParams& p, const RowTile& rows, int turn,
                                       int first_tile, int num_tiles, std::byte* queries,
                                       const std::byte* buffers, Phases& phases) {
  const int64_t group_row = rows.first_row + turn * kGroupRows;
  const int64_t warp_row = group_row + threadIdx.x % kGroupThreads / 32 * kTiledRows;
  load_group_queries<kDim>(p, rows, group_row, queries);
  show_to_products();
  meet_some(kGroupBarrier + turn, kGroupThreads);

  // A warp beyond the last row works on what nobody asks for.
  const Sight sight =
      find_sight(rows, warp_row < rows.num_rows ? warp_row : rows.first_row, p.window);
  const float unit = p.soft_cap > 0 ? 1.0f : p.scale * kLog2E;  // of a score, as a power of 2
  const uint64_t query = describe(shared_address(queries), 16);
  const auto buffer = [&](bool is_value, int tile) {
    return shared_address(buffers) + buffer_of(is_value, tile) * kBufferBytes<kDim>;
  };
  const auto await_full = [&](bool is_value, int tile) {
    await_phase(&phases.full[buffer_of(is_value, tile)], tile / kWgmmaStages % 2);
  };
  const auto release = [&](bool is_value, int tile) {
    if (threadIdx.x % 32 == 0) arrive(&phases.empty[buffer_of(is_value, tile)]);
  };

  float s[64];
  float o[kDim / 2];
  uint32_t weights[8][4];
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) o[i] = 0.0f;
  Softmax softmax{{-INFINITY, -INFINITY}, {0.0f, 0.0f}, {0.0f, 0.0f}};

  // The first warpgroup has the first turn.
  if (turn == 1) arrive_some(kTurnBarrier, kAllConsumers);
  await_full(false, 0);
  settle_registers();
  ask_for_scores<kDim>(s, query, describe(buffer(false, 0), 16));
  wait_for_products<0>();
  pin(s);
  release(false, 0);
  cap_and_mask(s, p, sight, first_tile * kTile);
  softmax.take(s, unit);
  pack_weights(s, weights);
  for (int tile = 1; tile < num_tiles; ++tile) {
    await_full(false, tile);
    await_full(true, tile - 1);
    meet_some(kTurnBarrier + turn, kAllConsumers);
    pin(s);
    pin(o);
    pin(weights);
    settle_registers();
    ask_for_scores<kDim>(s, query, describe(buffer(false, tile), 16));
    ask_for_values<kDim>(o, weights, describe(buffer(true, tile - 1), kBlockBytes<kTile>),
                         tile > 1);
    if (turn == 0 || tile + 1 < num_tiles) arrive_some(kTurnBarrier + 1 - turn, kAllConsumers);
    wait_for_products<1>();
    pin(s);
    release(false, tile);
    cap_and_mask(s, p, sight, (first_tile + tile) * kTile);
    softmax.take(s, unit);
    wait_for_products<0>();
    pin(o);
    pin(weights);
    release(true, tile - 1);
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] *= softmax.scale[i / 2 % 2];
    pack_weights(s, weights);
  }
  await_full(true, num_tiles - 1);
  pin(o);
  pin(weights);
  settle_registers();
  ask_for_values<kDim>(o, weights, describe(buffer(true, num_tiles - 1), kBlockBytes<kTile>),
                       num_tiles > 1);
  wait_for_products<0>();
  pin(o);
  pin(weights);

#pragma unroll
  for (int g = 0; g < 2; ++g) {
    float sum = softmax.sum[g];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    const int64_t row = warp_row + threadIdx.x % 32 / 4 + g * 8;
    if (row >= rows.num_rows) continue;
    const Ending ending = end_row(p, rows, row, softmax.m[g] * unit, sum);
    const float share = ending.kept / ending.divisor;
    auto* to = reinterpret_cast<uint2*>(output_of(p, rows, row) + threadIdx.x % 4 * 2);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      store_whole(to + n * 4, uint2{__float_as_uint(o[n * 4 + 2 * g] * share),
                                    __float_as_uint(o[n * 4 + 2 * g + 1] * share)});
    }
  }
}

// blockIdx (KV head, sequence, row tile from the last to the first: the longest work begins first),
// for sequences of p.wgmma_rows and more. Shared memory: the queries of either warpgroup, then four
// buffers of a tile, from a multiple of 1,024 bytes on.
template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) wgmma_kernel(AttentionParams p) {
  LLMSERVE_DYNAMIC_SHARED(std::byte, shared);
  __shared__ Phases phases;
  const int64_t first_row = (static_cast<int64_t>(gridDim.z) - 1 - blockIdx.z) * kWgmmaRows;
  const RowTile rows = find_rows(p, blockIdx.y, blockIdx.x, first_row, kWgmmaRows);
  if (first_row >= rows.num_rows || rows.num_rows < p.wgmma_rows) return;
  std::byte* queries = shared + (1024 - shared_address(shared) % 1024) % 1024;
  std::byte* buffers = queries + kWgmmaRows * kDim * 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) {
      init_phases(&phases.full[i], 32);
      init_phases(&phases.empty[i], kAllConsumers / 32);
    }
  }
  __syncthreads();

  const int first_tile = rows.first_seen / kTile;
  const int num_tiles = rows.last_seen / kTile - first_tile + 1;
  const int warpgroup = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (warpgroup == kConsumers) {
    give_registers<kCopyRegisters>();
    copy_tiles<kDim>(p, rows, first_tile, num_tiles, buffers, phases);
  } else {
    take_registers<kRowRegisters>();
    attend<kDim>(p, rows, warpgroup, first_tile, num_tiles,
                 queries + warpgroup * kGroupRows * kDim * 2, buffers, phases);
  }
}

template <int kDim>
struct Kernel {
  static void prepare() {
    check("cudaFuncSetAttribute of attention",
          cudaFuncSetAttribute(reinterpret_cast<const void*>(wgmma_kernel<kDim>),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(wgmma_bytes(kDim))));
  }
  static void run(const AttentionParams& p, int64_t row_tiles, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(p.keys.num_heads), static_cast<unsigned>(p.num_sequences),
                    static_cast<unsigned>(row_tiles));
    launch("paged_attention", wgmma_kernel<kDim>, grid, kThreads,
           static_cast<size_t>(wgmma_bytes(kDim)), stream, p);
  }
};

}  // namespace

WgmmaKernels wgmma_kernels(int64_t width) {
  if (width == 64) return {&Kernel<64>::prepare, &Kernel<64>::run};
  if (width == 128) return {&Kernel<128>::prepare, &Kernel<128>::run};
  return {};
}

}  // namespace llmserve::cuda
