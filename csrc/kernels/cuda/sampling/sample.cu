// Drawing tokens: the same choice as on the CPU from the same logits. Edits and the rest are
// arithmetic of one token at a time, and nothing else depends on an order. Two launches, in each of
// which several blocks share a row (row_pieces): the first edits and finds the largest logit, the
// second draws. Whoever is last of a row's blocks puts together what they found; none waits.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sampling/row_passes.cuh"

namespace llmserve::cuda {
namespace {

constexpr int kThreads = kSampleThreads;

// -- the first launch ---------------------------------------------------------------------------

constexpr Place kNoNumber = ~Place{0};  // of a row with a NaN or +inf

// The largest of a stretch.
__device__ Place largest_place(const float* x, Stretch stretch, Together& together) {
  float largest = -INFINITY;
  int32_t token_id = 0;
  bool is_bad = false;
  for_fours<2>(x, stretch, [&](int32_t i, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      is_bad |= !(four.at[j] < INFINITY);
      if (four.at[j] > largest) {  // a thread's ids ascend: the first of equals stays
        largest = four.at[j];
        token_id = i + j;
      }
    }
  });
  return block_best(is_bad ? kNoNumber : place_of(largest, token_id), together);
}

// Of a whole row's largest: no NaN, no +inf, something finite.
__device__ __forceinline__ bool is_number(Place place) {
  return place != kNoNumber && value_at(place) != -INFINITY;
}

template <class T>
__device__ __forceinline__ const T* entries(const std::byte* data, const DrawList& list) {
  return reinterpret_cast<const T*>(data + list.begin);
}

__device__ __forceinline__ float penalized(float value, int32_t num_generated,
                                           const DrawSettings& draw) {
  value = value > 0 ? value / draw.repetition_penalty : value * draw.repetition_penalty;
  value -= draw.frequency_penalty * static_cast<float>(num_generated);
  return num_generated > 0 ? value - draw.presence_penalty : value;
}

// z = the row's edited copy, of a stretch. A list names a token once, so that each has one thread
// at a time.
__device__ void edit(const DrawRow& row, const std::byte* data, Stretch stretch, float* z) {
  const auto is_here = [&](int32_t id) { return id >= stretch.begin && id < stretch.end; };
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const float* start = row.logits.count > 0 ? entries<float>(data, row.logits) : row.raw;
  for (int32_t i = stretch.begin + thread; i < stretch.end; i += kThreads) z[i] = start[i];
  __syncthreads();
  const auto* biases = entries<DrawBias>(data, row.biases);
  for (int64_t i = thread; i < row.biases.count; i += kThreads)
    if (is_here(biases[i].token_id)) z[biases[i].token_id] += biases[i].bias;
  __syncthreads();
  const auto* allowed = entries<uint32_t>(data, row.allowed);
  if (row.allowed.count > 0) {
    for (int32_t i = stretch.begin + thread; i < stretch.end; i += kThreads)
      if ((allowed[i / 32] >> (i % 32) & 1u) == 0) z[i] = -INFINITY;
  }
  const auto* banned = entries<int32_t>(data, row.banned);
  for (int64_t i = thread; i < row.banned.count; i += kThreads)
    if (is_here(banned[i])) z[banned[i]] = -INFINITY;
  __syncthreads();
  const auto* counts = entries<DrawCount>(data, row.counts);
  const int32_t late = row.late_token != nullptr ? *row.late_token : -1;
  int is_counted = 0;
  for (int64_t i = thread; i < row.counts.count; i += kThreads) {
    const DrawCount count = counts[i];
    if (!is_here(count.token_id)) continue;
    const int is_late = count.token_id == late ? 1 : 0;
    z[count.token_id] = penalized(z[count.token_id], count.num_generated + is_late, row.draw);
    is_counted |= is_late;
  }
  is_counted = __syncthreads_or(is_counted);
  if (is_here(late) && is_counted == 0 && thread == 0) z[late] = penalized(z[late], 1, row.draw);
  __syncthreads();
}

// What is known of a row when all its blocks have been through it: rows that need no noise are
// done, state.best of the others is the largest of the logits to draw from.
__device__ void finish_scan(DrawRow& row, DrawnRow& out) {
  DrawState& state = row.state;
  const Place raw_best = atomicMax(&state.raw_best, 0ull);
  const Place best =
      row.is_edited && row.forced_token_id < 0 ? atomicMax(&state.best, 0ull) : raw_best;
  const bool is_raw_valid = is_number(raw_best);
  const bool is_valid = is_raw_valid && is_number(best);
  const bool is_forced = row.forced_token_id >= 0;
  const bool is_greedy = row.draw.temperature < kGreedyTemperature;
  state.raw_max = value_at(raw_best);
  state.raw_best = 0;
  state.num_scanned = 0;
  state.best = is_valid && !is_forced && !is_greedy ? best : 0;
  if (state.best != 0) return;
  const int32_t token = is_forced ? row.forced_token_id : token_at(best);
  out = {is_valid ? token : 0, is_raw_valid, is_valid};
}

// blockIdx.x: pieces of the rows [0, S), row by row.
__global__ void __launch_bounds__(kThreads, 2)
    scan_kernel(DrawRow* rows, const std::byte* data, int32_t n, RowPieces pieces, float* all_z,
                DrawnRow* out) {
  __shared__ Together together;
  wait_for_previous();
  const auto r = static_cast<int64_t>(blockIdx.x) / pieces.count;
  DrawRow& row = rows[r];
  if (row.raw == nullptr) return;  // the whole block
  const Stretch stretch = stretch_of(static_cast<int32_t>(blockIdx.x) % pieces.count, pieces, n);
  const Place raw_best = largest_place(row.raw, stretch, together);
  const bool is_edited = row.is_edited && row.forced_token_id < 0;
  Place best = 0;
  if (is_edited) {
    float* z = all_z + r * n;
    edit(row, data, stretch, z);
    best = largest_place(z, stretch, together);
  }
  if (threadIdx.x != 0) return;
  atomicMax(&row.state.raw_best, raw_best);
  if (is_edited) atomicMax(&row.state.best, best);
  __threadfence();
  const uint32_t num_before = atomicAdd(&row.state.num_scanned, 1u);
  if (num_before + 1 == static_cast<uint32_t>(pieces.count)) finish_scan(row, out[r]);
}

// -- the second launch --------------------------------------------------------------------------

constexpr float kMargin = 0.01f;  // more than what exp and log are off, in a logarithm

// What z is of a row's logits: (x - max) / temperature, or -inf for what the filters take out, as
// far as they are known; and a token's weight in the sum of top-p.
struct Filtered {
  float max;
  float temperature;
  float min_p;
  float least;            // less is out
  uint32_t least_weight;  // likewise

  __device__ Filtered(const DrawRow& row)
      : max(value_at(row.state.best)),
        temperature(row.draw.temperature),
        min_p(row.draw.min_p),
        least(min_p >= 1e-30f ? v_log(min_p) - kMargin : -INFINITY),
        least_weight(0) {}
  __device__ __forceinline__ void raise_least(float z) { least = v_max(least, z); }
  __device__ __forceinline__ void set_least_weight(uint32_t w) {
    least_weight = w;
    raise_least(v_log(static_cast<float>(w) * 0x1p-30f) - kMargin);
  }
  __device__ __forceinline__ float scaled(float x) const {
    const float z = x - max;
    return temperature == 1.0f ? z : z / temperature;
  }
  __device__ __forceinline__ float operator()(float x) const {
    const float z = scaled(x);
    if (z < least) return -INFINITY;
    if (min_p == 0 && least_weight == 0) return z;
    const float p = v_exp(z);
    return p >= min_p && static_cast<uint32_t>(p * 0x1p30f) >= least_weight ? z : -INFINITY;
  }
  __device__ __forceinline__ uint32_t weight(float x) const {
    const float z = scaled(x);
    if (z < least || z < -21.0f) return 0;  // which it is of so small a z
    const float p = v_exp(z);
    return p >= min_p ? static_cast<uint32_t>(p * 0x1p30f) : 0;
  }
};

// Buckets of weights: 64 to an octave, of which there are 31.
constexpr int kBuckets = 2048;
constexpr int kOwnBuckets = kBuckets / kThreads;  // of a thread

__device__ __forceinline__ int bucket_of(uint32_t w) {  // w > 0
  const int zeros = __clz(static_cast<int>(w));
  return (31 - zeros) * 64 + static_cast<int>((w << zeros) >> 25 & 63u);
}
// What no weight of an earlier bucket reaches.
__device__ __forceinline__ uint32_t bucket_begin(int bucket) {
  return static_cast<uint32_t>((static_cast<uint64_t>(64 + bucket % 64) << (bucket / 64)) >> 6);
}

// 32.3 KiB.
struct Shared {
  union {
    Listed listed;
    struct {
      uint32_t low[kBuckets];  // of a mass of 64 bits: shared memory adds 32 at a time
      uint32_t high[kBuckets];
    } mass;
  };
  Together together;
  unsigned long long above;  // mass above the bucket chosen
  int bucket;
};

// The mass that top-p keeps at least.
__device__ __forceinline__ unsigned long long kept_mass(float top_p, unsigned long long total) {
  const double mass = ceil(static_cast<double>(top_p) * static_cast<double>(total));
  return mass > 1.0 ? static_cast<unsigned long long>(mass) : 1ull;
}

__device__ __forceinline__ unsigned long long listed_mass(uint32_t tried, uint32_t num_listed,
                                                          const Listed& listed) {
  unsigned long long mass = 0;
  for (uint32_t at = threadIdx.x; at < num_listed; at += kThreads)
    mass += listed.keys[at] >= tried ? listed.keys[at] : 0;
  return mass;
}

// The least weight that top-p keeps of a row all of whose kept tokens are listed. Keys become
// weights.
__device__ uint32_t least_listed_weight(const float* x, float top_p, const Filtered& filtered,
                                        uint32_t num_listed, Shared& s) {
  unsigned long long mine = 0;
  for (uint32_t at = threadIdx.x; at < num_listed; at += kThreads)
    mine += s.listed.keys[at] = filtered.weight(x[s.listed.token_ids[at]]);
  const unsigned long long total = block_total(mine, s.together);
  return largest_threshold(
      kept_mass(top_p, total), 0,
      [&](uint32_t tried) { return listed_mass(tried, num_listed, s.listed); }, s.together);
}

// The bucket in which the mass from the top reaches what top-p keeps, and the mass above it, to
// `s`. Returns the mass that is kept.
__device__ unsigned long long choose_bucket(const float* x, int32_t n, float top_p,
                                            const Filtered& filtered, Shared& s) {
  for (int b = threadIdx.x; b < kBuckets; b += kThreads) s.mass.low[b] = s.mass.high[b] = 0;
  __syncthreads();
  for_fours<1>(x, {0, n}, [&](int32_t, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t w = filtered.weight(four.at[j]);
      if (w == 0) continue;
      const int b = bucket_of(w);
      const uint32_t before = atomicAdd(&s.mass.low[b], w);
      if (before + w < before) atomicAdd(&s.mass.high[b], 1u);
    }
  });
  __syncthreads();
  const int first = kOwnBuckets * static_cast<int>(threadIdx.x);
  const auto mass = [&](int b) {
    return static_cast<unsigned long long>(s.mass.high[b]) << 32 | s.mass.low[b];
  };
  unsigned long long mine = 0;
  for (int b = first; b < first + kOwnBuckets; ++b) mine += mass(b);
  const unsigned long long total = block_total(mine, s.together);
  const unsigned long long target = kept_mass(top_p, total);
  unsigned long long above = total - sum_before(mine, s.together) - mine;
  for (int b = first + kOwnBuckets - 1; b >= first; --b) {
    if (above < target && above + mass(b) >= target) {  // one bucket of all
      s.bucket = b;
      s.above = above;
    }
    above += mass(b);
  }
  __syncthreads();
  return target;
}

// The least weight that top-p keeps of a row: of a bucket's tokens, or where these are too many to
// be listed, of the half, the quarter and so on in which it is.
__device__ uint32_t least_weight(const float* x, int32_t n, float top_p, const Filtered& filtered,
                                 Shared& s) {
  const unsigned long long target = choose_bucket(x, n, top_p, filtered, s);
  unsigned long long above = s.above;
  uint32_t begin = bucket_begin(s.bucket);
  uint32_t end = bucket_begin(s.bucket + 1);
  while (begin + 1 < end) {
    if (threadIdx.x == 0) s.together.num_listed = 0;
    __syncthreads();
    const uint32_t middle = begin + (end - begin) / 2;
    unsigned long long upper = 0;
    for_fours<1>(x, {0, n}, [&](int32_t, const Four& four) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t w = filtered.weight(four.at[j]);
        if (w < begin || w >= end) continue;
        upper += w >= middle ? w : 0;
        const uint32_t at = atomicAdd(&s.together.num_listed, 1u);
        if (at < kMaxListed) s.listed.keys[at] = w;
      }
    });
    __syncthreads();
    const uint32_t num_listed = s.together.num_listed;
    upper = block_total(upper, s.together);
    if (num_listed <= kMaxListed) {
      return largest_threshold(
          target - above, 0,
          [&](uint32_t tried) { return listed_mass(tried, num_listed, s.listed); }, s.together);
    }
    if (above + upper >= target) {
      begin = middle;
    } else {
      end = middle;
      above += upper;
    }
  }
  return begin;
}

// The argmax of z + noise, of what one thread has seen.
struct Winner {
  static constexpr float kMaxNoise = 17.0f;  // v_gumbel's bound, rounded up

  int64_t position;
  uint64_t seed;
  float score = -INFINITY;
  int32_t token_id = INT32_MAX;
  float bound = -INFINITY;  // the best score of the warp's lanes

  __device__ __forceinline__ void take(float z, uint32_t bits, int32_t id) {
    const float candidate = z + v_gumbel(bits);
    if (candidate < score || (candidate == score && id > token_id)) return;
    score = candidate;
    token_id = id;
  }
  // Tokens i … i + 3, which share one call of the noise. Few of a row can win, and noise is two
  // logarithms a token: with u = 1 - (m - 1/2) / 2^23 it is at most -log(m / 2^24), which is at
  // most log(2) times 24 less the whole part of log2(m). The warp's lanes call this together.
  template <class Value>
  __device__ __forceinline__ void take_four(int32_t i, const Four& four, const Value& value) {
    float z[4];
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      z[j] = value(four.at[j]);
      largest = v_max(largest, z[j]);
    }
    UVec bits[4];
    bool is_contender = largest + kMaxNoise > bound;
    if (is_contender) {
      u_token_bits(static_cast<uint32_t>(i) / 4, position, seed, bits);
      uint32_t most = bits[0];
#pragma unroll
      for (int j = 1; j < 4; ++j) most = bits[j] > most ? bits[j] : most;
      const int m = (1 << 23) - static_cast<int>(most >> 9);
      const float most_noise = static_cast<float>(__clz(m) - 7) * 0.69314718f + kMargin;
      is_contender = largest + most_noise >= bound;
    }
    if (__any_sync(kAllLanes, is_contender) == 0) return;
    if (is_contender) {
#pragma unroll
      for (int j = 0; j < 4; ++j) take(z[j], bits[j], i + j);
    }
    bound = warp_max(score);
  }
  __device__ __forceinline__ void take_one(int32_t id, float z) {
    UVec bits[4];
    u_token_bits(static_cast<uint32_t>(id) / 4, position, seed, bits);
    const int j = id % 4;
    take(z, j == 0 ? bits[0] : j == 1 ? bits[1] : j == 2 ? bits[2] : bits[3], id);
  }
  __device__ __forceinline__ Place place() const { return place_of(score, token_id); }
};

#define inline __device__ __forceinline__
#include "core/math/sigma.inc"
#undef inline

// The least z that top-n-sigma keeps of a row x.
__device__ float least_of_sigma(const float* x, int32_t n, float max, const DrawSettings& draw,
                                Together& together) {
  unsigned long long count = 0, steps = 0, squares = 0;
  for_fours<1>(x, {0, n}, [&](int32_t, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (four.at[j] == -INFINITY) continue;
      const unsigned long long below = sigma_steps(max - four.at[j]);
      ++count;
      steps += below;
      squares += below * below;
    }
  });
  count = block_total(count, together);
  steps = block_total(steps, together);
  squares = block_total(squares, together);
  return sigma_threshold(draw.top_n_sigma, count, steps, squares) / draw.temperature;
}

// Whether a row takes more than its own z to tell who is left.
__device__ __forceinline__ bool has_filters(const DrawSettings& draw, int32_t n) {
  return (draw.top_k > 0 && draw.top_k < n) || draw.top_p < 1.0f || draw.top_n_sigma > 0;
}

// What top-n-sigma, top-k and top-p take out, by one block. Returns how many tokens are listed, all
// that are left among them; if more than kMaxListed, the list is of no use.
__device__ uint32_t filter(const DrawRow& row, const float* x, int32_t n, Filtered& filtered,
                           Shared& s) {
  uint32_t num_listed = kMaxListed + 1;
  if (row.draw.top_n_sigma > 0)
    filtered.raise_least(least_of_sigma(x, n, filtered.max, row.draw, s.together));
  if (row.draw.top_k > 0 && row.draw.top_k < n) {
    num_listed = list_largest(x, n, row.draw.top_k, filtered, s.listed, s.together);
    filtered.raise_least(
        kth_largest(x, n, row.draw.top_k, filtered, s.listed, num_listed, s.together));
  }
  if (row.draw.top_p < 1.0f) {
    filtered.set_least_weight(num_listed <= kMaxListed
                                  ? least_listed_weight(x, row.draw.top_p, filtered, num_listed, s)
                                  : least_weight(x, n, row.draw.top_p, filtered, s));
  }
  return num_listed;
}

// blockIdx.x: as in scan_kernel. The first block of a row that is filtered has all of it.
__global__ void __launch_bounds__(kThreads, 2)
    draw_kernel(DrawRow* rows, int32_t n, RowPieces pieces, const float* all_z, DrawnRow* out) {
  __shared__ Shared s;
  wait_for_previous();
  const auto r = static_cast<int64_t>(blockIdx.x) / pieces.count;
  const auto piece = static_cast<int32_t>(blockIdx.x) % pieces.count;
  DrawRow& row = rows[r];
  const bool is_filtered = has_filters(row.draw, n);
  if (is_filtered && piece != 0) return;                  // the whole block
  if (row.raw == nullptr || row.state.best == 0) return;  // likewise
  const float* x = row.is_edited ? all_z + r * n : row.raw;
  Filtered filtered(row);
  const uint32_t num_listed =
      is_filtered ? filter(row, x, n, filtered, s) : static_cast<uint32_t>(kMaxListed + 1);
  Winner winner{.position = row.position, .seed = row.seed};
  if (num_listed <= kMaxListed) {
    for (uint32_t at = threadIdx.x; at < num_listed; at += kThreads) {
      const int32_t id = s.listed.token_ids[at];
      winner.take_one(id, filtered(x[id]));
    }
  } else {
    for_fours<1>(x, is_filtered ? Stretch{0, n} : stretch_of(piece, pieces, n),
                 [&](int32_t i, const Four& four) { winner.take_four(i, four, filtered); });
  }
  Place best = block_best(winner.place(), s.together);
  if (threadIdx.x != 0) return;
  DrawState& state = row.state;
  if (!is_filtered) {
    atomicMax(&state.best_score, best);
    __threadfence();
    const uint32_t num_before = atomicAdd(&state.num_drawn, 1u);
    if (num_before + 1 != static_cast<uint32_t>(pieces.count)) return;
    best = atomicMax(&state.best_score, 0ull);
  }
  state.best = state.best_score = 0;
  state.num_drawn = 0;
  out[r] = {token_at(best), 1, 1};
}

}  // namespace

void draw(DrawRow* rows, int64_t num_rows, const std::byte* data, int64_t vocabulary, float* z,
          DrawnRow* out, cudaStream_t stream) {
  if (num_rows == 0) return;
  const RowPieces pieces = row_pieces(num_rows, vocabulary);
  const dim3 grid = blocks(num_rows * pieces.count);
  const auto n = static_cast<int32_t>(vocabulary);
  launch_early("sample", scan_kernel, grid, kThreads, 0, stream, rows, data, n, pieces, z, out);
  launch_early("sample", draw_kernel, grid, kThreads, 0, stream, rows, n, pieces, z, out);
}

}  // namespace llmserve::cuda
