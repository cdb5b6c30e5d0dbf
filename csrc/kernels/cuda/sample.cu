// Drawing tokens and reporting their log-probabilities: one block a row, no sort. The same choice
// as on the CPU from the same logits: edits and the rest are arithmetic of one token at a time, the
// filters are comparisons, counts and integer sums, whose order does not matter.
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kBuckets = 2 * kThreads;  // of a digit: two a thread
constexpr float kGreedyTemperature = 1e-5f;

// What the block shares: 24.1 KiB.
struct Shared {
  unsigned long long mass[kBuckets];
  unsigned long long suffix[kThreads];
  float best[32];
  int32_t best_idx[32];
  unsigned long long sum[32];
  unsigned long long above;  // mass above the bucket chosen
  uint32_t bucket;
};

struct Best {
  float value;
  int32_t idx;
};
__device__ __forceinline__ Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.idx < a.idx) ? b : a;
}

// The largest value of the block and the lowest index that has it, for every thread.
__device__ Best block_best(Best mine, Shared& s) {
  for (int offset = 16; offset > 0; offset /= 2) {
    mine = better(mine, {__shfl_xor_sync(kAllLanes, mine.value, offset),
                         __shfl_xor_sync(kAllLanes, mine.idx, offset)});
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    s.best[threadIdx.x / 32] = mine.value;
    s.best_idx[threadIdx.x / 32] = mine.idx;
  }
  __syncthreads();
  Best result{s.best[0], s.best_idx[0]};
  for (int warp = 1; warp < kThreads / 32; ++warp)
    result = better(result, {s.best[warp], s.best_idx[warp]});
  return result;
}

__device__ unsigned long long block_total(unsigned long long mine, Shared& s) {
  for (int offset = 16; offset > 0; offset /= 2) mine += __shfl_xor_sync(kAllLanes, mine, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.sum[threadIdx.x / 32] = mine;
  __syncthreads();
  unsigned long long total = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) total += s.sum[warp];
  return total;
}

// Integers of the same order as the floats; kernels/cpu/threshold.h.
__device__ __forceinline__ uint32_t ordered_key(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
// A token's weight in the sum of top-p.
__device__ __forceinline__ uint32_t weight(float z) {
  return static_cast<uint32_t>(v_exp(z) * 0x1p30f);
}

// A token's key: its weight, which is its mass too, or the order of its logit, whose mass is 1.
template <bool kIsWeighted>
__device__ __forceinline__ uint32_t key_of(float z) {
  return kIsWeighted ? weight(z) : ordered_key(z);
}

// The highest bucket at which the mass from the top reaches `target`, or 0 if none does; its place
// in s.bucket, the mass above it in s.above. Thread t owns the buckets 2t and 2t + 1.
__device__ void choose_bucket(unsigned long long target, Shared& s) {
  const int t = threadIdx.x;
  const unsigned long long low = s.mass[2 * t];
  const unsigned long long high = s.mass[2 * t + 1];
  s.suffix[t] = low + high;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {  // suffix[t]: the mass of buckets >= 2t
    const unsigned long long more = t + step < kThreads ? s.suffix[t + step] : 0;
    __syncthreads();
    s.suffix[t] += more;
    __syncthreads();
  }
  if (t == 0) {  // unless another thread's buckets reach the target
    s.bucket = 0;
    s.above = s.suffix[0] - low;
  }
  __syncthreads();
  const unsigned long long above = t + 1 < kThreads ? s.suffix[t + 1] : 0;
  if (above < target && above + high >= target) {
    s.bucket = static_cast<uint32_t>(2 * t + 1);
    s.above = above;
  } else if (above < target && above + high + low >= target) {
    s.bucket = static_cast<uint32_t>(2 * t);
    s.above = above + high;
  }
  __syncthreads();
}

// The largest key t for which the mass of the keys >= t reaches `target` (at least 1), or 0 if none
// does: radix select by digits of 11, 11 and 10 bits.
template <bool kIsWeighted>
__device__ uint32_t select_threshold(const float* z, int64_t n, unsigned long long target,
                                     Shared& s) {
  uint32_t threshold = 0;
  uint32_t decided = 0;  // the bits of the threshold that are known
  for (int digit = 0; digit < 3; ++digit) {
    const int shift = digit == 0 ? 21 : (digit == 1 ? 10 : 0);
    const uint32_t mask = digit == 2 ? 0x3ffu : 0x7ffu;
    for (int i = threadIdx.x; i < kBuckets; i += kThreads) s.mass[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
      const uint32_t key = key_of<kIsWeighted>(z[i]);
      if ((key & decided) == threshold)
        atomicAdd(&s.mass[(key >> shift) & mask], kIsWeighted ? key : 1ull);
    }
    __syncthreads();
    choose_bucket(target, s);
    threshold |= s.bucket << shift;
    decided |= mask << shift;
    target -= target > s.above ? s.above : 0;
    __syncthreads();  // before the next digit clears what was just read
  }
  return threshold;
}

// Filters set z to -inf. Each thread reads and writes the elements threadIdx.x + i * kThreads.
__device__ void filter(const DrawRow& row, float* z, int64_t n, Shared& s) {
  if (row.top_k > 0 && row.top_k < n) {
    const float threshold = from_ordered_key(
        select_threshold<false>(z, n, static_cast<unsigned long long>(row.top_k), s));
    for (int64_t i = threadIdx.x; i < n; i += kThreads)
      if (z[i] < threshold) z[i] = -INFINITY;
    __syncthreads();
  }
  if (row.top_p < 1.0f) {
    unsigned long long mine = 0;
    for (int64_t i = threadIdx.x; i < n; i += kThreads) mine += weight(z[i]);
    const unsigned long long total = block_total(mine, s);
    const double mass = ceil(static_cast<double>(row.top_p) * static_cast<double>(total));
    const unsigned long long target = mass > 1.0 ? static_cast<unsigned long long>(mass) : 1ull;
    const uint32_t threshold = select_threshold<true>(z, n, target, s);
    for (int64_t i = threadIdx.x; i < n; i += kThreads)
      if (weight(z[i]) < threshold) z[i] = -INFINITY;
    __syncthreads();
  }
}

// argmax of z_i + g_i. Thread t takes the quads t, t + kThreads, … of four tokens, which share one
// call of the noise.
__device__ int32_t gumbel_argmax(const DrawRow& row, const float* z, int64_t n, Shared& s) {
  Best mine{-INFINITY, INT32_MAX};
  for (int64_t quad = threadIdx.x; 4 * quad < n; quad += kThreads) {
    UVec bits[4];
    u_token_bits(static_cast<uint32_t>(quad), row.position, row.seed, bits);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t i = 4 * quad + j;
      if (i < n) mine = better(mine, {z[i] + v_gumbel(bits[j]), static_cast<int32_t>(i)});
    }
  }
  return block_best(mine, s).idx;
}

// The largest of a row; is_valid: no NaN, no +inf, something finite.
__device__ Best row_best(const float* x, int64_t n, bool& is_valid, Shared& s) {
  Best mine{-INFINITY, INT32_MAX};
  int is_bad = 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const float value = x[i];
    is_bad |= isnan(value) || value == INFINITY ? 1 : 0;
    mine = better(mine, {value, static_cast<int32_t>(i)});
  }
  const Best best = block_best(mine, s);
  is_valid = __syncthreads_or(is_bad) == 0 && best.value != -INFINITY;
  return best;
}

template <class T>
__device__ __forceinline__ const T* entries(const std::byte* data, const DrawList& list) {
  return reinterpret_cast<const T*>(data + list.begin);
}

__device__ __forceinline__ float penalized(float value, int32_t num_generated, const DrawRow& row) {
  value = value > 0 ? value / row.repetition_penalty : value * row.repetition_penalty;
  value -= row.frequency_penalty * static_cast<float>(num_generated);
  return num_generated > 0 ? value - row.presence_penalty : value;
}

// z = the row's edited copy. A list names a token once, so that each has one thread at a time.
__device__ void edit(const DrawRow& row, const std::byte* data, int64_t n, float* z) {
  const float* start = row.logits.count > 0 ? entries<float>(data, row.logits) : row.raw;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) z[i] = start[i];
  __syncthreads();
  const auto* biases = entries<DrawBias>(data, row.biases);
  for (int64_t i = threadIdx.x; i < row.biases.count; i += kThreads)
    z[biases[i].token_id] += biases[i].bias;
  __syncthreads();
  const auto* allowed = entries<uint32_t>(data, row.allowed);
  if (row.allowed.count > 0) {
    for (int64_t i = threadIdx.x; i < n; i += kThreads)
      if ((allowed[i / 32] >> (i % 32) & 1u) == 0) z[i] = -INFINITY;
  }
  const auto* banned = entries<int32_t>(data, row.banned);
  for (int64_t i = threadIdx.x; i < row.banned.count; i += kThreads)
    if (banned[i] >= 0 && banned[i] < n) z[banned[i]] = -INFINITY;
  __syncthreads();
  const auto* counts = entries<DrawCount>(data, row.counts);
  const int32_t late = row.late_token != nullptr ? *row.late_token : -1;
  int is_counted = 0;
  for (int64_t i = threadIdx.x; i < row.counts.count; i += kThreads) {
    float& value = z[counts[i].token_id];
    const int is_late = counts[i].token_id == late ? 1 : 0;
    value = penalized(value, counts[i].num_generated + is_late, row);
    is_counted |= is_late;
  }
  is_counted = __syncthreads_or(is_counted);
  if (late >= 0 && is_counted == 0 && threadIdx.x == 0) z[late] = penalized(z[late], 1, row);
  __syncthreads();
}

// blockIdx.x: row, in [0, S).
__global__ void __launch_bounds__(kThreads) draw_kernel(const DrawRow* rows, const std::byte* data,
                                                        int64_t n, float* all_z, DrawnRow* out) {
  __shared__ Shared s;
  const DrawRow row = rows[blockIdx.x];
  if (row.raw == nullptr) return;  // the whole block
  float* z = all_z + static_cast<int64_t>(blockIdx.x) * n;
  bool is_raw_valid = false;
  Best best = row_best(row.raw, n, is_raw_valid, s);
  bool is_valid = is_raw_valid;
  const float* x = row.raw;
  if (row.is_edited && is_valid && row.forced_token_id < 0) {
    edit(row, data, n, z);
    x = z;
    best = row_best(x, n, is_valid, s);
  }
  int32_t token = best.idx;
  if (row.forced_token_id >= 0) {
    token = row.forced_token_id;
  } else if (is_valid && row.temperature >= kGreedyTemperature) {
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
      const float value = (x[i] - best.value) / row.temperature;
      z[i] = row.min_p > 0 && !(v_exp(value) >= row.min_p) ? -INFINITY : value;
    }
    __syncthreads();
    filter(row, z, n, s);
    token = gumbel_argmax(row, z, n, s);
  }
  if (threadIdx.x == 0) out[blockIdx.x] = {is_valid ? token : 0, is_raw_valid, is_valid};
}

// The sum over the block, whose order depends on nothing, for every thread.
__device__ double block_double(double mine, Shared& s) {
  for (int offset = 16; offset > 0; offset /= 2) mine += __shfl_xor_sync(kAllLanes, mine, offset);
  auto* sums = reinterpret_cast<double*>(s.sum);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
  __syncthreads();
  double total = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) total += sums[warp];
  return total;
}

// The sum of the threads before this one.
__device__ unsigned long long sum_before(unsigned long long mine, Shared& s) {
  const int t = threadIdx.x;
  __syncthreads();
  s.suffix[t] = mine;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const unsigned long long more = t >= step ? s.suffix[t - step] : 0;
    __syncthreads();
    s.suffix[t] += more;
    __syncthreads();
  }
  return s.suffix[t] - mine;
}

// The k largest of x to `top`, 0 < k <= n: all above the k-th largest, then the first of those that
// equal it. Thread t has a stretch of ids, so that the threads' order is that of the ids.
__device__ void gather_top(const float* x, int64_t n, int32_t k, TopEntry* top, Shared& s) {
  const float threshold =
      from_ordered_key(select_threshold<false>(x, n, static_cast<unsigned long long>(k), s));
  const int64_t stretch = (n + kThreads - 1) / kThreads;
  const int64_t begin = threadIdx.x * stretch;
  const int64_t end = begin + stretch < n ? begin + stretch : n;
  unsigned long long above = 0;
  unsigned long long equal = 0;
  for (int64_t i = begin; i < end; ++i) {
    above += x[i] > threshold ? 1 : 0;
    equal += x[i] == threshold ? 1 : 0;
  }
  unsigned long long next_above = sum_before(above, s);
  unsigned long long next_equal = block_total(above, s) + sum_before(equal, s);
  for (int64_t i = begin; i < end; ++i) {
    const bool is_above = x[i] > threshold;
    if (!is_above && x[i] != threshold) continue;
    const unsigned long long at = is_above ? next_above++ : next_equal++;
    if (at < static_cast<unsigned long long>(k)) top[at] = {static_cast<int32_t>(i), x[i]};
  }
}

// blockIdx.x: reporting row.
__global__ void __launch_bounds__(kThreads)
    report_kernel(const ReportRow* rows, int64_t n, Report* out, TopEntry* top) {
  __shared__ Shared s;
  const ReportRow row = rows[blockIdx.x];
  bool is_valid = false;
  const float max = row_best(row.raw, n, is_valid, s).value;
  if (!is_valid) return;  // the whole block
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads)
    sum += static_cast<double>(v_exp(row.raw[i] - max));
  sum = block_double(sum, s);
  if (threadIdx.x == 0) out[blockIdx.x] = {max, v_log(static_cast<float>(sum))};
  if (row.num_top > 0) gather_top(row.raw, n, row.num_top, top + row.top_begin, s);
}

// blockIdx.x: query.
__global__ void __launch_bounds__(kThreads)
    rank_kernel(const RankQuery* queries, const DrawnRow* drawn, int64_t n, Ranked* out) {
  __shared__ Shared s;
  const RankQuery query = queries[blockIdx.x];
  const int32_t id = query.token_id >= 0 ? query.token_id : drawn[query.row].token_id;
  const float logit = query.raw[id];
  unsigned long long larger = 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) larger += query.raw[i] > logit ? 1 : 0;
  const unsigned long long total = block_total(larger, s);
  if (threadIdx.x == 0) out[blockIdx.x] = {logit, 1 + static_cast<int32_t>(total)};
}

}  // namespace

void draw(const DrawRow* rows, int64_t num_rows, const std::byte* data, int64_t vocabulary,
          float* z, DrawnRow* out, cudaStream_t stream) {
  if (num_rows == 0) return;
  launch("sample", draw_kernel, blocks(num_rows), kThreads, 0, stream, rows, data, vocabulary, z,
         out);
}

void report(const ReportRow* rows, int64_t num_rows, int64_t vocabulary, Report* out, TopEntry* top,
            cudaStream_t stream) {
  if (num_rows == 0) return;
  launch("sample", report_kernel, blocks(num_rows), kThreads, 0, stream, rows, vocabulary, out,
         top);
}

void rank(const RankQuery* queries, int64_t num_queries, const DrawnRow* drawn, int64_t vocabulary,
          Ranked* out, cudaStream_t stream) {
  if (num_queries == 0) return;
  launch("sample", rank_kernel, blocks(num_queries), kThreads, 0, stream, queries, drawn,
         vocabulary, out);
}

}  // namespace llmserve::cuda
