// Passes over a row of logits, and what the threads of a block make of them together. All of it is
// comparisons, maxima and sums of integers, whose order does not matter.
#pragma once

#include "kernels/cuda/fours.cuh"

namespace llmserve::cuda {

// Elements of a row: from a multiple of 4 on, to another or the row's end.
struct Stretch {
  int32_t begin;
  int32_t end;
};
// Of one of the blocks that share a row; those past its end have none.
__device__ __forceinline__ Stretch stretch_of(int32_t piece, RowPieces pieces, int32_t n) {
  const int64_t begin = static_cast<int64_t>(piece) * pieces.size;
  const int64_t end = begin + pieces.size;
  return {static_cast<int32_t>(begin < n ? begin : n), static_cast<int32_t>(end < n ? end : n)};
}

constexpr int32_t kSampleRound = 4 * kSampleThreads;  // elements that a block takes at a time

// A thread's fours of the rounds from `base` on, -inf beyond the stretch.
template <int kRounds>
__device__ __forceinline__ void load_fours(const float* x, Stretch stretch, int32_t base,
                                           Four (&fours)[kRounds]) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0 && stretch.end % 4 == 0;
  const int32_t first = base + 4 * static_cast<int32_t>(threadIdx.x);
  if (is_aligned) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      float4 four = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      const int32_t i = first + r * kSampleRound;
      if (i < stretch.end) four = *reinterpret_cast<const float4*>(x + i);
      fours[r] = {{four.x, four.y, four.z, four.w}};
    }
  } else {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t i = first + r * kSampleRound + j;
        fours[r].at[j] = i < stretch.end ? x[i] : -INFINITY;
      }
    }
  }
}

// take(i, elements i … i + 3) of a stretch, -inf beyond its end, while as many rounds as `take` is
// unrolled for are on their way: two of them for what is limited by reading, one for what is not,
// whose code would not fit the instruction cache. The threads of a block take side by side and
// equally often, so that they may meet in it.
template <int kRounds, class Take>
__device__ __forceinline__ void for_fours(const float* x, Stretch stretch, const Take& take) {
  Four next[kRounds];
  load_fours(x, stretch, stretch.begin, next);
#pragma unroll 1
  for (int32_t base = stretch.begin; base < stretch.end; base += kRounds * kSampleRound) {
    Four fours[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) fours[r] = next[r];
    if (base + kRounds * kSampleRound < stretch.end)
      load_fours(x, stretch, base + kRounds * kSampleRound, next);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int32_t begin = base + r * kSampleRound;
      if (begin < stretch.end) take(begin + 4 * static_cast<int32_t>(threadIdx.x), fours[r]);
    }
  }
}

// Integers of the same order as the floats, zeros of both signs being one; kernels/cpu/threshold.h.
__device__ __forceinline__ uint32_t ordered_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A value and its token, as an integer that is larger where the value is, or else the id lower.
// Never 0.
using Place = unsigned long long;
__device__ __forceinline__ Place place_of(float value, int32_t token_id) {
  return static_cast<Place>(ordered_key(value)) << 32 | ~static_cast<uint32_t>(token_id);
}
__device__ __forceinline__ float value_at(Place place) {
  return from_ordered_key(static_cast<uint32_t>(place >> 32));
}
__device__ __forceinline__ int32_t token_at(Place place) {
  return static_cast<int32_t>(~static_cast<uint32_t>(place));
}

constexpr int kSampleWarps = kSampleThreads / 32;
// Tokens that a block can list: 32 KiB.
constexpr int kMaxListed = 4096;

struct Listed {
  uint32_t keys[kMaxListed];
  int32_t token_ids[kMaxListed];
};
// What the threads of a block bring together.
struct Together {
  unsigned long long of_warp[kSampleWarps];
  uint32_t num_listed;
};

// Every thread gets these.
template <class T>
__device__ T block_total(T mine, Together& together) {
  for (int offset = 16; offset > 0; offset /= 2) mine += __shfl_xor_sync(kAllLanes, mine, offset);
  __syncthreads();  // an earlier call may still be reading
  if (threadIdx.x % 32 == 0) together.of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  T total = 0;
#pragma unroll
  for (int warp = 0; warp < kSampleWarps; ++warp) total += static_cast<T>(together.of_warp[warp]);
  return total;
}
__device__ inline Place block_best(Place mine, Together& together) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const Place other = __shfl_xor_sync(kAllLanes, mine, offset);
    mine = other > mine ? other : mine;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) together.of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  Place best = 0;
#pragma unroll
  for (int warp = 0; warp < kSampleWarps; ++warp)
    best = together.of_warp[warp] > best ? together.of_warp[warp] : best;
  return best;
}
// The sum of the threads before this one.
__device__ inline unsigned long long sum_before(unsigned long long mine, Together& together) {
  const int lane = threadIdx.x % 32;
  unsigned long long sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const unsigned long long more = __shfl_sync(kAllLanes, sum, lane >= step ? lane - step : lane);
    sum += lane >= step ? more : 0;
  }
  __syncthreads();
  if (lane == 31) together.of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(threadIdx.x) / 32; ++warp)
    sum += together.of_warp[warp];
  return sum - mine;
}

// The largest t for which the block's masses of the keys >= t reach `target` (at least 1), or 0 if
// none does; of its bits only those from `last_bit` on, the others being 0. mass_from(t) is a
// thread's mass, of the type of the target.
template <class Mass, class MassFrom>
__device__ __forceinline__ uint32_t largest_threshold(Mass target, int last_bit,
                                                      const MassFrom& mass_from,
                                                      Together& together) {
  uint32_t threshold = 0;
#pragma unroll 1
  for (int bit = 31; bit >= last_bit; --bit) {
    const uint32_t tried = threshold | 1u << bit;
    if (block_total<Mass>(mass_from(tried), together) >= target) threshold = tried;
  }
  return threshold;
}

// Lists the k largest tokens of a row by value(x), some more that are not much smaller, and all
// that equal one of these; none that is -inf. Returns how many they are: if more than kMaxListed,
// some of them are not listed.
template <class Value>
__device__ __forceinline__ uint32_t list_largest(const float* x, int32_t n, int32_t k,
                                                 const Value& value, Listed& listed,
                                                 Together& together) {
  // Of 2,048 groups of tokens: k tokens are as large as the k-th largest of their maxima, and only
  // a few more, since most groups have none or one of them. 16 bits of it will do.
  if (k > 4 * kSampleThreads && n > kMaxListed) return kMaxListed + 1;
  float best[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  for_fours<2>(x, {0, n}, [&](int32_t, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) best[j] = v_max(best[j], value(four.at[j]));
  });
  const uint32_t bound = largest_threshold(
      static_cast<uint32_t>(k), 16,
      [&](uint32_t tried) {
        uint32_t count = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) count += ordered_key(best[j]) >= tried ? 1 : 0;
        return count;
      },
      together);
  constexpr uint32_t kLeastFinite = 0x00800000u;
  const float least = from_ordered_key(bound > kLeastFinite ? bound : kLeastFinite);
  if (threadIdx.x == 0) together.num_listed = 0;
  __syncthreads();
  for_fours<2>(x, {0, n}, [&](int32_t i, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float candidate = value(four.at[j]);
      if (!(candidate >= least)) continue;
      const uint32_t at = atomicAdd(&together.num_listed, 1u);
      if (at >= kMaxListed) continue;
      listed.keys[at] = ordered_key(candidate);
      listed.token_ids[at] = i + j;
    }
  });
  __syncthreads();
  return together.num_listed;
}

// The k-th largest of value(x), k <= n; num_listed is what list_largest() returned for them.
template <class Value>
__device__ __forceinline__ float kth_largest(const float* x, int32_t n, int32_t k,
                                             const Value& value, const Listed& listed,
                                             uint32_t num_listed, Together& together) {
  const auto target = static_cast<uint32_t>(k);
  const bool is_listed = num_listed <= kMaxListed;
  if (is_listed && num_listed < target) return -INFINITY;  // so few are more than that
  const auto count_listed = [&](uint32_t tried) {
    uint32_t count = 0;
    for (uint32_t at = threadIdx.x; at < num_listed; at += kSampleThreads)
      count += listed.keys[at] >= tried ? 1 : 0;
    return count;
  };
  const auto count_all = [&](uint32_t tried) {
    uint32_t count = 0;
    for_fours<1>(x, {0, n}, [&](int32_t i, const Four& four) {
#pragma unroll
      for (int j = 0; j < 4; ++j) count += i + j < n && ordered_key(value(four.at[j])) >= tried;
    });
    return count;
  };
  return from_ordered_key(is_listed ? largest_threshold(target, 0, count_listed, together)
                                    : largest_threshold(target, 0, count_all, together));
}

}  // namespace llmserve::cuda
