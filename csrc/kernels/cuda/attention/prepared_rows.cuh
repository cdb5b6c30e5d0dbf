// What a block of decoding attention does by itself of prepare_qkv, where every sequence of the
// step has one token: it norms and turns the query heads that it needs, and whoever has the newest
// position writes its key and value to the cache and takes them into its tiles from registers.
// Nobody else of the step reads them. The bits are those of prepare_qkv.cu.
#pragma once

#include "kernels/cuda/attention/held_heads.cuh"
#include "kernels/cuda/attention/tiled_rows.cuh"

namespace llmserve::cuda {
namespace {

// In place of QkvParams, of a step whose queries are prepared already.
struct Prepared {};

// One head a warp.
template <int kDim>
using WarpHead = Held<32, (kDim + 127) / 128, 1>;

template <int kDim>
__device__ __forceinline__ void load_head(const float* from, Four (&x)[WarpHead<kDim>::kFours]) {
#pragma unroll
  for (int f = 0; f < WarpHead<kDim>::kFours; ++f)
    x[f] = load_four<true>(from, 4 * (threadIdx.x % 32 + f * 32), kDim);
}

// The queries of the tile's rows, the heads of one token, as load_queries has them: a warp each,
// one after another.
template <int kDim, int kWarps>
__device__ __forceinline__ void prepare_queries(const QkvParams& p, const RowTile& rows,
                                                int64_t token, uint16_t* to) {
  using Shape = WarpHead<kDim>;
  const int lane = threadIdx.x % 32;
  const float* angles = p.q_cos_sin.data ? p.q_cos_sin.data + token * p.q_cos_sin.stride : nullptr;
  constexpr int kAtOnce = 4;  // heads that a warp asks for before it needs the first
  for (int first = threadIdx.x / 32; first < kTiledRows; first += kAtOnce * kWarps) {
    Four x[kAtOnce][Shape::kFours] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * kWarps;
      const int64_t head = rows.kv_head * rows.group + row;
      if (row < rows.num_rows) load_head<kDim>(p.q.data + token * p.q.stride + head * kDim, x[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * kWarps;
      if (row < rows.num_rows) prepare_head<Shape>(p, p.q_norm, angles, x[i]);
#pragma unroll
      for (int f = 0; f < Shape::kFours; ++f) {
        const int column = 4 * (lane + f * 32);
        if (column >= kDim) continue;
        auto* pairs = reinterpret_cast<uint32_t*>(to + row * kStrideOf<kDim> + column);
        pairs[0] = pack_bf16(x[i][f].at[0], x[i][f].at[1]);
        pairs[1] = pack_bf16(x[i][f].at[2], x[i][f].at[3]);
      }
    }
  }
}

// A head's row as a tile has it of the cache: in bf16, through codes where these are kept; or codes
// themselves, where the tile has them.
template <int kDim, Storage kStorage, bool kIsCodes>
struct TileRow {
  uint32_t words[WarpHead<kDim>::kFours][kIsCodes ? 1 : 2];
  float scale;  // of codes

  // Also to the slot in the cache.
  __device__ __forceinline__ void take(const CachePart& part, int64_t slot, int64_t head,
                                       const Four (&x)[WarpHead<kDim>::kFours]) {
    using Shape = WarpHead<kDim>;
    store_head<kStorage, Shape>(part, slot / part.block_size, slot % part.block_size, head, x,
                                true);
    if constexpr (kStorage == Storage::kF8) {
      const Codes<Shape> codes = encode_head<Shape>(x);
      scale = codes.scale;
      const uint32_t factors = pack_bf16(scale, scale);
#pragma unroll
      for (int f = 0; f < Shape::kFours; ++f) {
        if constexpr (kIsCodes)
          words[f][0] = codes.words[f];
        else
          widen_word(codes.words[f], factors, words[f]);
      }
    } else {
#pragma unroll
      for (int f = 0; f < Shape::kFours; ++f) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          words[f][i] = float_to_bf16(x[f].at[2 * i]) |
                        static_cast<uint32_t>(float_to_bf16(x[f].at[2 * i + 1])) << 16;
      }
    }
  }
  __device__ __forceinline__ void put(void* row) const {
    constexpr int kWords = kIsCodes ? 1 : 2;
#pragma unroll
    for (int f = 0; f < WarpHead<kDim>::kFours; ++f) {
      const int four = static_cast<int>(threadIdx.x % 32 + f * 32);
      if (4 * four >= kDim) continue;
#pragma unroll
      for (int i = 0; i < kWords; ++i) static_cast<uint32_t*>(row)[four * kWords + i] = words[f][i];
    }
  }
};

// The newest key and value of a sequence and KV head, of the warp whose unit has their position:
// first asked for, then prepared, so that nobody waits for them.
template <int kDim, Storage kStorage, bool kIsCodes>
struct Newest {
  Four k[WarpHead<kDim>::kFours];
  Four v[WarpHead<kDim>::kFours];
  TileRow<kDim, kStorage, kIsCodes> key;
  TileRow<kDim, kStorage, kIsCodes> value;

  __device__ __forceinline__ void load(const QkvParams& p, int64_t token, int64_t kv_head) {
    load_head<kDim>(p.k.data + token * p.k.stride + kv_head * kDim, k);
    load_head<kDim>(p.v.data + token * p.v.stride + kv_head * kDim, v);
  }
  __device__ __forceinline__ void prepare(const QkvParams& p, int64_t token, int64_t kv_head,
                                          int64_t slot) {
    const ConstRows& angles = p.k_cos_sin;
    prepare_head<WarpHead<kDim>>(p, p.k_norm,
                                 angles.data ? angles.data + token * angles.stride : nullptr, k);
    key.take(p.keys, slot, kv_head, k);
    value.take(p.values, slot, kv_head, v);
  }
};

}  // namespace
}  // namespace llmserve::cuda
