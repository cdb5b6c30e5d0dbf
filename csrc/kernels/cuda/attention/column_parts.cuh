// What a block of column_attention.cuh is made of: its shared memory, copies from the cache,
// scores, weights of its rows, and sums of its columns.
#pragma once

#include "kernels/cuda/attention/column_kernels.h"
#include "kernels/cuda/attention/tiled_rows.cuh"

namespace llmserve::cuda {
namespace {

// column_stride(), of a width that is known when a kernel runs, and what of it is filled.
__device__ __forceinline__ int filled_width(int width) { return (width + 15) / 16 * 16; }
__device__ __forceinline__ int padded_width(int width) { return filled_width(width) + 8; }

// The shared memory of a block, in the order of column_bytes(). Rows lie `stride` elements apart as
// bf16. A half of a unit is kColumnHalf rows of keys and then, where they are apart, of values.
template <int kRowTiles, Storage kStorage>
struct ColumnShared {
  static constexpr int kRows = kTiledRows * kRowTiles;
  static constexpr bool kIsF8 = kStorage == Storage::kF8;
  static constexpr bool kHoldsQuery = kRowTiles == 1;

  int width;
  int value_width;
  bool has_own_values;
  int stride;
  int value_stride;
  int row_bytes;  // of what is copied
  int value_row_bytes;
  int half_bytes;
  int ring_size;      // halves
  uint16_t* query;    // [kRows], where registers do not hold it
  uint16_t* widened;  // a unit of what is copied as codes
  std::byte* ring;
  float* scores;      // [2, kRows], sums over half a key each
  uint16_t* weights;  // [kRows]
  float* unit_scale;  // [kRows], as what follows: of a unit, what becomes of the sums before it
  float* merge_old;   // and of a span or stretch, how much of both goes into both
  float* merge_new;
  float* kept;  // Ending
  float* divisor;
  float* stretch_m;  // maxima, as powers of 2, and sums of the weights
  float* stretch_sum;
  float* whole_m;
  float* whole_sum;

  __device__ __forceinline__ ColumnShared(const AttentionParams& p, const ColumnParams& c,
                                          uint16_t* shared)
      : width(static_cast<int>(p.keys.width)),
        value_width(static_cast<int>(p.values.width)),
        has_own_values(p.values.data != p.keys.data),
        stride(padded_width(width)),
        value_stride(has_own_values ? padded_width(value_width) : stride),
        row_bytes(kIsF8 ? width : stride * 2),
        value_row_bytes(kIsF8 ? value_width : value_stride * 2),
        half_bytes(kColumnHalf * (row_bytes + (has_own_values ? value_row_bytes : 0))),
        ring_size(c.ring),
        query(shared),
        widened(kHoldsQuery ? shared : shared + kRows * stride),
        ring(reinterpret_cast<std::byte*>(widened + (kIsF8 ? 2 * widened_half() : 0))),
        scores(reinterpret_cast<float*>(ring + ring_size * half_bytes)),
        weights(reinterpret_cast<uint16_t*>(scores + 2 * kRows * kColumnScoreStride)),
        unit_scale(reinterpret_cast<float*>(weights + kRows * kColumnWeightStride)),
        merge_old(unit_scale + kRows),
        merge_new(merge_old + kRows),
        kept(merge_new + kRows),
        divisor(kept + kRows),
        stretch_m(divisor + kRows),
        stretch_sum(stretch_m + kRows),
        whole_m(stretch_sum + kRows),
        whole_sum(whole_m + kRows) {}

  // Elements of a half as bf16.
  __device__ __forceinline__ int widened_half() const {
    return kColumnHalf * (stride + (has_own_values ? value_stride : 0));
  }
  // A ring that is no larger than a unit is filled when that has been worked on; a larger one as
  // soon as the unit before has been.
  __device__ __forceinline__ bool copies_late() const { return !kIsF8 && ring_size == 2; }
};

// Copies of halves of units into the ring, by 8 lanes a row: warp w has rows 4 w to 4 w + 3. Blocks
// of the cache are looked up two halves ahead, so that nobody waits for them then.
template <int kRowTiles, Storage kStorage>
class HalfCopies {
  using Shared = ColumnShared<kRowTiles, kStorage>;
  static constexpr int kSize = Shared::kIsF8 ? 1 : 2;

 public:
  // Of positions [begin, end), of which a tile's rows see some.
  __device__ __forceinline__ HalfCopies(const AttentionParams& p, const RowTile& rows,
                                        const Shared& at, int begin, int end)
      : p_(p),
        rows_(rows),
        at_(at),
        begin_(begin),
        end_(end),
        row_(static_cast<int>(threadIdx.x) / 8),
        num_copied_(Shared::kIsF8 || at.copies_late() ? 2 : at.ring_size - 2) {}

  // Positions that first() is to copy.
  __device__ __forceinline__ int first_positions() const { return num_copied_ * kColumnHalf; }
  __device__ __forceinline__ void first() {
#pragma unroll
    for (int half = 0; half < kColumnMaxRing - 2; ++half)
      if (half < num_copied_) copy(half, half % 2, block_of(half));
  }
  // Once after first().
  __device__ __forceinline__ void look_ahead() {
    blocks_[0] = block_of(num_copied_);
    blocks_[1] = block_of(num_copied_ + 1);
  }
  // The next two halves.
  __device__ __forceinline__ void next() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy(num_copied_, i, blocks_[i]);
      ++num_copied_;
      blocks_[i] = block_of(num_copied_ + 1);
    }
  }
  // Until the thread's copies of the next unit are done.
  __device__ __forceinline__ void wait() const {
    static_assert(kColumnMaxRing - 4 <= 2);
    const int later = Shared::kIsF8 || at_.copies_late() ? 0 : at_.ring_size - 4;
    if (later == 0)
      wait_for_all_but<0>();
    else if (later == 1)
      wait_for_all_but<1>();
    else
      wait_for_all_but<2>();
  }

  // The warp's rows of the unit whose codes are there, as bf16.
  __device__ __forceinline__ void widen() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::byte* codes = at_.ring + h * at_.half_bytes;
      uint16_t* to = at_.widened + h * at_.widened_half();
      widen_row(codes + row_ * at_.row_bytes, key_scales_[h], to + row_ * at_.stride, at_.width);
      if (at_.has_own_values)
        widen_row(codes + kColumnHalf * at_.row_bytes + row_ * at_.value_row_bytes,
                  value_scales_[h], to + kColumnHalf * at_.stride + row_ * at_.value_stride,
                  at_.value_width);
    }
  }

 private:
  __device__ __forceinline__ int32_t block_of(int half) const {
    const int position = begin_ + half * kColumnHalf + row_;
    return position < end_ ? find_block(p_, rows_, position) : -1;
  }

  // What no row sees, and what a row is filled up with, becomes zeros.
  __device__ __forceinline__ void copy_row(const CachePart& part, int32_t block, int position,
                                           std::byte* to, int num_elements) const {
    int64_t offset = 0;
    if (block >= 0)
      offset = head_offset(part, block, rows_.kv_head) +
               position % static_cast<int>(part.block_size) * part.row_stride;
    const std::byte* from = static_cast<const std::byte*>(part.data) + offset * kSize;
    for (int at = threadIdx.x % 8 * 16; at < filled_width(num_elements) * kSize; at += 8 * 16) {
      const bool is_there = block >= 0 && at < num_elements * kSize;
      copy_async(to + at, from + (is_there ? at : 0), is_there);
    }
  }

  // parity: half % 2. Halves of units that are beyond the end are empty groups.
  __device__ __forceinline__ void copy(int half, int parity, int32_t block) {
    const int position = begin_ + half * kColumnHalf + row_;
    std::byte* to = at_.ring + slot_ * at_.half_bytes;
    if (begin_ + half / 2 * kUnit < end_) {
      copy_row(p_.keys, block, position, to + row_ * at_.row_bytes, at_.width);
      if (at_.has_own_values)
        copy_row(p_.values, block, position,
                 to + kColumnHalf * at_.row_bytes + row_ * at_.value_row_bytes, at_.value_width);
    }
    if constexpr (Shared::kIsF8) {
      key_scales_[parity] = find_scale<kStorage>(p_, p_.keys, rows_, block, position);
      value_scales_[parity] = find_scale<kStorage>(p_, p_.values, rows_, block, position);
    }
    commit_copies();
    slot_ = slot_ + 1 == at_.ring_size ? 0 : slot_ + 1;
  }

  __device__ __forceinline__ static void widen_row(const std::byte* codes, float scale,
                                                   uint16_t* to, int count) {
    const uint32_t scales = pack_bf16(scale, scale);
    for (int at = threadIdx.x % 8 * 4; at < count; at += 8 * 4) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(codes + at);
      auto* pairs = reinterpret_cast<uint32_t*>(to + at);
      pairs[0] = widen_codes((word & 0xffu) << 8 | (word & 0xff00u) << 16, scales);
      pairs[1] = widen_codes((word >> 8 & 0xff00u) | (word & 0xff000000u), scales);
    }
  }

  const AttentionParams& p_;
  const RowTile& rows_;
  const Shared& at_;
  int begin_;
  int end_;
  int row_;  // of a half
  int num_copied_;
  int slot_ = 0;  // of the next
  int32_t blocks_[2];
  float key_scales_[2];
  float value_scales_[2];
};

// A warp's part of a unit's scores: half of the key's steps of 16 elements, 16 rows, and 16 of the
// positions, or 32 where there are two row tiles. kSteps: of half a key, at most.
template <int kRowTiles, int kSteps, Storage kStorage>
class UnitScores {
  using Shared = ColumnShared<kRowTiles, kStorage>;

 public:
  // Queries of the whole tile as bf16; rows beyond the last one are zeros.
  __device__ __forceinline__ static void load(const AttentionParams& p, const RowTile& rows,
                                              const Shared& at, uint16_t* to) {
    const int64_t first_token = p.query_starts[rows.sequence];
    for (int r = threadIdx.x / 32; r < Shared::kRows; r += kColumnWarps) {
      const auto row = static_cast<int>(rows.first_row) + r;
      const bool is_there = row < rows.num_rows;
      const int64_t head = rows.kv_head * rows.group + row % rows.group;
      const float* from =
          p.q + (first_token + row / rows.group) * p.q_token_stride + head * p.q_head_stride;
      for (int column = threadIdx.x % 32 * 2; column < filled_width(at.width); column += 64) {
        const uint32_t pair =
            is_there && column < at.width ? pack_bf16(from[column], from[column + 1]) : 0;
        *reinterpret_cast<uint32_t*>(to + r * at.stride + column) = pair;
      }
    }
  }

  // query: where load() put them. One row tile's are held from then on.
  __device__ __forceinline__ UnitScores(const Shared& at, const uint16_t* query) {
    const int warp = threadIdx.x / 32;
    const int steps = filled_width(at.width) / 16;
    const int half = (steps + 1) / 2;
    part_ = warp % 2;
    tile_ = kRowTiles == 2 ? warp / 2 % 2 : 0;
    position_ = kRowTiles == 2 ? warp / 4 * 32 : warp / 2 * 16;
    first_step_ = part_ * half;
    num_steps_ = part_ == 0 ? half : steps - half;
    const int lane = threadIdx.x % 32;
    query_ = query + (tile_ * kTiledRows + lane / 8 % 2 * 8 + lane % 8) * at.stride +
             first_step_ * 16 + lane / 16 * 8;
    if constexpr (Shared::kHoldsQuery) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        if (step < num_steps_) load_matrices(held_[step], query_ + step * 16);
    }
  }

  __device__ __forceinline__ void make(const Shared& at, const uint16_t* const (&halves)[2]) const {
    const int lane = threadIdx.x % 32;
    float s[2 * kRowTiles][4] = {};
    const uint16_t* keys = (position_ < kColumnHalf ? halves[0] : halves[1]) +
                           (position_ % kColumnHalf + lane / 16 * 8 + lane % 8) * at.stride +
                           first_step_ * 16 + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step >= num_steps_) break;
      uint32_t a[4];
      if constexpr (Shared::kHoldsQuery) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = held_[step][i];
      } else {
        load_matrices(a, query_ + step * 16);
      }
#pragma unroll
      for (int pair = 0; pair < kRowTiles; ++pair) {  // 16 positions: two fragments of B
        uint32_t b[4];
        load_matrices(b, keys + pair * 16 * at.stride + step * 16);
        multiply_add(s[2 * pair], a, b[0], b[1]);
        multiply_add(s[2 * pair + 1], a, b[2], b[3]);
      }
    }
    float* to = at.scores +
                (part_ * Shared::kRows + tile_ * kTiledRows + lane / 4) * kColumnScoreStride +
                position_ + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2 * kRowTiles; ++n) {
#pragma unroll
      for (int g = 0; g < 2; ++g)
        *reinterpret_cast<float2*>(to + g * 8 * kColumnScoreStride + n * 8) =
            float2{s[n][2 * g], s[n][2 * g + 1]};
    }
  }

 private:
  int part_;
  int tile_;
  int position_;  // of the unit
  int first_step_;
  int num_steps_;
  const uint16_t* query_;
  uint32_t held_[Shared::kHoldsQuery ? kSteps : 1][4];
};

// The largest of 16 lanes, and their sum in an order of its own.
__device__ __forceinline__ float half_warp_max(float x) {
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, mask));
  return x;
}
__device__ __forceinline__ float half_warp_sum(float x) {
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}

// Weights of a unit, of which 16 lanes have a row of each row tile, each lane 4 positions: they
// have a span's maxima, as powers of 2, and sums, and the first of them its row's numbers in shared
// memory, which those read who have the columns.
template <int kRowTiles, Storage kStorage>
class RowWeights {
  using Shared = ColumnShared<kRowTiles, kStorage>;

 public:
  __device__ __forceinline__ RowWeights(const AttentionParams& p, const RowTile& rows,
                                        const Shared& at) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      // Rows beyond the last one see what the first does: nobody asks what they come to.
      const int r = row_of(t);
      const int64_t row = rows.first_row + r;
      last_seen_[t] = rows.position(row < rows.num_rows ? row : rows.first_row);
      first_seen_[t] = first_seen_from(last_seen_[t], p.window);
      span_m_[t] = -INFINITY;
      span_sum_[t] = 0.0f;
      if (!is_first()) continue;
      at.stretch_m[r] = at.whole_m[r] = -INFINITY;
      at.stretch_sum[r] = at.whole_sum[r] = 0.0f;
    }
  }

  // The weights of the unit that begins at `unit`, of its scores.
  __device__ __forceinline__ void weigh(const AttentionParams& p, const Shared& at, int unit) {
    const float scale = p.soft_cap > 0 ? p.scale : p.scale * kLog2E;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const int row = row_of(t);
      const float* from = at.scores + row * kColumnScoreStride + quarter() * 4;
      const float4 low = *reinterpret_cast<const float4*>(from);
      const float4 high =
          *reinterpret_cast<const float4*>(from + Shared::kRows * kColumnScoreStride);
      float s[4] = {low.x + high.x, low.y + high.y, low.z + high.z, low.w + high.w};
      float largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[i] *= scale;
        if (p.soft_cap > 0) s[i] = p.soft_cap * v_tanh(s[i] / p.soft_cap) * kLog2E;
        const int position = unit + quarter() * 4 + i;
        if (position < first_seen_[t] || position > last_seen_[t]) s[i] = -INFINITY;
        largest = fmaxf(largest, s[i]);
      }
      const float m = fmaxf(span_m_[t], half_warp_max(largest));
      const float base = finite_or_zero(m);
      const float scale_old = fast_exp2(span_m_[t] - base);
      span_m_[t] = m;
      const uint32_t pairs[2] = {pack_bf16(fast_exp2(s[0] - base), fast_exp2(s[1] - base)),
                                 pack_bf16(fast_exp2(s[2] - base), fast_exp2(s[3] - base))};
      auto* to =
          reinterpret_cast<uint32_t*>(at.weights + row * kColumnWeightStride) + quarter() * 2;
      float sums[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to[i] = pairs[i];
        sums[i] = bf16_to_float(static_cast<uint16_t>(pairs[i])) +
                  bf16_to_float(static_cast<uint16_t>(pairs[i] >> 16));
      }
      span_sum_[t] = v_fma(span_sum_[t], scale_old, half_warp_sum(sums[0] + sums[1]));
      if (is_first()) at.unit_scale[row] = scale_old;
    }
  }

  // The span goes into the stretch, and begins afresh.
  __device__ __forceinline__ void end_span(const Shared& at) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      if (is_first()) add(at, row_of(t), span_m_[t], span_sum_[t], at.stretch_m, at.stretch_sum);
      span_m_[t] = -INFINITY;
      span_sum_[t] = 0.0f;
    }
  }
  // Likewise the stretch into all of the context.
  __device__ __forceinline__ void end_stretch(const Shared& at) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const int r = row_of(t);
      if (!is_first()) continue;
      add(at, r, at.stretch_m[r], at.stretch_sum[r], at.whole_m, at.whole_sum);
      at.stretch_m[r] = -INFINITY;
      at.stretch_sum[r] = 0.0f;
    }
  }
  // The context is at its end.
  __device__ __forceinline__ void end_rows(const AttentionParams& p, const RowTile& rows,
                                           const Shared& at) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const int r = row_of(t);
      const int64_t row = rows.first_row + r;
      if (!is_first() || row >= rows.num_rows) continue;
      const Ending ending = end_row(p, rows, row, at.whole_m[r], at.whole_sum[r]);
      at.kept[r] = ending.kept;
      at.divisor[r] = ending.divisor;
    }
  }
  // What a piece passes on; index_of(row) is the place of a row of the sequence.
  template <class Index>
  __device__ __forceinline__ void pass_on(const ColumnParams& c, const RowTile& rows,
                                          const Shared& at, const Index& index_of) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const int r = row_of(t);
      const int64_t row = rows.first_row + r;
      if (!is_first() || row >= rows.num_rows) continue;
      c.maxima[index_of(row)] = at.whole_m[r];
      c.sums[index_of(row)] = at.whole_sum[r];
    }
  }

 private:
  __device__ __forceinline__ static int quarter() { return threadIdx.x % 16; }
  __device__ __forceinline__ static bool is_first() { return quarter() == 0; }
  __device__ __forceinline__ static int row_of(int t) {
    return t * kTiledRows + static_cast<int>(threadIdx.x) / 16;
  }
  __device__ __forceinline__ static void add(const Shared& at, int r, float m, float sum,
                                             float* to_m, float* to_sum) {
    const Merge both = merge(to_m[r], m);
    to_m[r] = both.m;
    to_sum[r] = merged(both, to_sum[r], sum);
    at.merge_old[r] = both.scale_old;
    at.merge_new[r] = both.scale_new;
  }

  int first_seen_[kRowTiles];
  int last_seen_[kRowTiles];
  float span_m_[kRowTiles];
  float span_sum_[kRowTiles];
};

// A warp's columns of the output, kColumns of them for all rows, as fragments of C: of the span and
// of the stretch so far. What was merged of stretches lies where the output goes.
template <int kRowTiles, int kColumns, Storage kStorage>
class ColumnSums {
  using Shared = ColumnShared<kRowTiles, kStorage>;
  static constexpr int kFragments = kColumns / 8;

 public:
  __device__ __forceinline__ void add_unit(const Shared& at, const uint16_t* const (&halves)[2]) {
    if (first_column() >= at.value_width) return;
    const int lane = threadIdx.x % 32;
    uint32_t a[kRowTiles][4][4];
    float scales[kRowTiles][2];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const uint16_t* from = at.weights +
                             (t * kTiledRows + lane / 8 % 2 * 8 + lane % 8) * kColumnWeightStride +
                             lane / 16 * 8;
#pragma unroll
      for (int step = 0; step < 4; ++step) load_matrices(a[t][step], from + step * 16);
      scales[t][0] = at.unit_scale[t * kTiledRows + lane / 4];
      scales[t][1] = at.unit_scale[t * kTiledRows + lane / 4 + 8];
    }
    const int offset = (at.has_own_values ? kColumnHalf * at.stride : 0) +
                       (lane / 8 % 2 * 8 + lane % 8) * at.value_stride + first_column() +
                       lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      if (first_column() + n * 16 >= at.value_width) break;
      float sums[kRowTiles][2][4] = {};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t b[4];
        load_transposed(b, halves[step / 2] + offset + step % 2 * 16 * at.value_stride + n * 16);
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          multiply_add(sums[t][0], a[t][step], b[0], b[1]);
          multiply_add(sums[t][1], a[t][step], b[2], b[3]);
        }
      }
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& o = span_[t][2 * n + i / 4][i % 4];
          o = v_fma(o, scales[t][i % 4 / 2], sums[t][i / 4][i % 4]);
        }
      }
    }
  }

  __device__ __forceinline__ void end_span(const Shared& at) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const Merge both = factors(at, row_of(t, g));
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
#pragma unroll
          for (int i = 2 * g; i < 2 * g + 2; ++i) {
            stretch_[t][n][i] = merged(both, stretch_[t][n][i], span_[t][n][i]);
            span_[t][n][i] = 0.0f;
          }
        }
      }
    }
  }

  // place_of(row) is where a row of the sequence goes: what the stretches before came to, of which
  // `is_first` says that there were none; `is_ended` that it is divided there.
  template <class Place>
  __device__ __forceinline__ void end_stretch(const RowTile& rows, const Shared& at, bool is_first,
                                              bool is_ended, const Place& place_of) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const int r = row_of(t, g);
        if (rows.first_row + r >= rows.num_rows) continue;
        float* to = place_of(rows.first_row + r);
        const Merge both = factors(at, r);
#pragma unroll
        for (int e = 0; e < 2 * kFragments; ++e) {
          const int column = first_column() + e / 2 * 8 + threadIdx.x % 4 * 2 + e % 2;
          float& value = stretch_[t][e / 2][2 * g + e % 2];
          if (column < at.value_width) {
            const float so_far = is_first ? value : merged(both, to[column], value);
            to[column] = is_ended ? so_far * at.kept[r] / at.divisor[r] : so_far;
          }
          value = 0.0f;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static int first_column() { return threadIdx.x / 32 * kColumns; }
  __device__ __forceinline__ static int row_of(int t, int g) {
    return t * kTiledRows + static_cast<int>(threadIdx.x) % 32 / 4 + g * 8;
  }
  __device__ __forceinline__ static Merge factors(const Shared& at, int row) {
    return {0.0f, at.merge_old[row], at.merge_new[row]};
  }

  float span_[kRowTiles][kFragments][4] = {};
  float stretch_[kRowTiles][kFragments][4] = {};
};

}  // namespace
}  // namespace llmserve::cuda
