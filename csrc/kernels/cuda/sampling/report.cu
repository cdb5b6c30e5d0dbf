// Log-probabilities of rows that were drawn from: the sum of the exponentials, the best tokens, and
// ranks. The sum is one of integers, so that it depends on no order.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sampling/row_passes.cuh"

namespace llmserve::cuda {
namespace {

constexpr int kThreads = kSampleThreads;
// What exp(x - max), at most 1, is counted in: sums of 2^21 of them fit 64 bits, and what a row of
// 2^18 loses is 2^-25 of the sum, which is at least 1.
constexpr float kOne = 0x1p43f;

struct Shared {
  Listed listed;
  Together together;
};

// The k largest, 0 < k <= n, of a list that has them.
__device__ void gather_listed(const float* x, int32_t k, float threshold, uint32_t num_listed,
                              TopEntry* top, Shared& s) {
  const uint32_t key = ordered_key(threshold);
  uint32_t above = 0;
  for (uint32_t at = threadIdx.x; at < num_listed; at += kThreads)
    above += s.listed.keys[at] > key ? 1 : 0;
  const uint32_t num_equal = static_cast<uint32_t>(k) - block_total(above, s.together);
  const uint32_t lowest = largest_threshold(  // the inverse of the last id that is taken of equals
      num_equal, 0,
      [&](uint32_t tried) {
        uint32_t count = 0;
        for (uint32_t at = threadIdx.x; at < num_listed; at += kThreads)
          count +=
              s.listed.keys[at] == key && ~static_cast<uint32_t>(s.listed.token_ids[at]) >= tried;
        return count;
      },
      s.together);
  if (threadIdx.x == 0) s.together.num_listed = 0;
  __syncthreads();
  for (uint32_t at = threadIdx.x; at < num_listed; at += kThreads) {
    const int32_t id = s.listed.token_ids[at];
    if (s.listed.keys[at] < key ||
        (s.listed.keys[at] == key && ~static_cast<uint32_t>(id) < lowest))
      continue;
    top[atomicAdd(&s.together.num_listed, 1u)] = {id, x[id]};
  }
}

// The same of a whole row: all above the k-th largest, then the first of those that equal it.
// Thread t has a stretch of ids, so that the threads' order is that of the ids.
__device__ void gather_all(const float* x, int32_t n, int32_t k, float threshold, TopEntry* top,
                           Shared& s) {
  const int64_t stretch = (static_cast<int64_t>(n) + kThreads - 1) / kThreads;
  const int64_t begin = threadIdx.x * stretch;
  const int64_t end = begin + stretch < n ? begin + stretch : n;
  unsigned long long above = 0;
  unsigned long long equal = 0;
  for (int64_t i = begin; i < end; ++i) {
    above += x[i] > threshold ? 1 : 0;
    equal += x[i] == threshold ? 1 : 0;
  }
  unsigned long long next_above = sum_before(above, s.together);
  unsigned long long next_equal = block_total(above, s.together) + sum_before(equal, s.together);
  for (int64_t i = begin; i < end; ++i) {
    const bool is_above = x[i] > threshold;
    if (!is_above && x[i] != threshold) continue;
    const unsigned long long at = is_above ? next_above++ : next_equal++;
    if (at < static_cast<unsigned long long>(k)) top[at] = {static_cast<int32_t>(i), x[i]};
  }
}

__device__ void gather_top(const float* x, int32_t n, int32_t k, TopEntry* top, Shared& s) {
  const auto value = [](float logit) { return logit; };
  const uint32_t num_listed = list_largest(x, n, k, value, s.listed, s.together);
  const float threshold = kth_largest(x, n, k, value, s.listed, num_listed, s.together);
  if (num_listed >= static_cast<uint32_t>(k) && num_listed <= kMaxListed)
    gather_listed(x, k, threshold, num_listed, top, s);
  else
    gather_all(x, n, k, threshold, top, s);
}

// blockIdx.x: of each reporting row its pieces, and one block more, which finds its best tokens.
__global__ void __launch_bounds__(kThreads, 2)
    report_kernel(ReportRow* rows, const DrawRow* draw_rows, const DrawnRow* drawn, int32_t n,
                  RowPieces pieces, Report* out, TopEntry* top) {
  __shared__ Shared s;
  wait_for_previous();
  const auto r = static_cast<int64_t>(blockIdx.x) / (pieces.count + 1);
  const auto piece = static_cast<int32_t>(blockIdx.x) % (pieces.count + 1);
  ReportRow& row = rows[r];
  if (drawn[row.row].is_raw_valid == 0) return;  // the whole block
  if (piece == pieces.count) {
    if (row.num_top > 0) gather_top(row.raw, n, row.num_top, top + row.top_begin, s);
    return;
  }
  const float max = draw_rows[row.row].state.raw_max;
  unsigned long long sum = 0;
  for_fours<2>(row.raw, stretch_of(piece, pieces, n), [&](int32_t, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      sum += static_cast<unsigned long long>(v_exp(four.at[j] - max) * kOne);
  });
  sum = block_total(sum, s.together);
  if (threadIdx.x != 0) return;
  atomicAdd(&row.sum, sum);
  __threadfence();
  const uint32_t num_before = atomicAdd(&row.num_added, 1u);
  if (num_before + 1 != static_cast<uint32_t>(pieces.count)) return;
  const double total = static_cast<double>(atomicAdd(&row.sum, 0ull)) / static_cast<double>(kOne);
  row.sum = 0;
  row.num_added = 0;
  out[r] = {max, v_log(static_cast<float>(total))};
}

// blockIdx.x: pieces of the queries' rows, query by query.
__global__ void __launch_bounds__(kThreads) rank_kernel(RankQuery* queries, const DrawnRow* drawn,
                                                        int32_t n, RowPieces pieces, Ranked* out) {
  __shared__ Together together;
  wait_for_previous();
  const auto q = static_cast<int64_t>(blockIdx.x) / pieces.count;
  const auto piece = static_cast<int32_t>(blockIdx.x) % pieces.count;
  RankQuery& query = queries[q];
  const int32_t id = query.token_id >= 0 ? query.token_id : drawn[query.row].token_id;
  const float logit = query.raw[id];
  uint32_t larger = 0;
  for_fours<2>(query.raw, stretch_of(piece, pieces, n), [&](int32_t, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) larger += four.at[j] > logit ? 1 : 0;
  });
  larger = block_total(larger, together);
  if (threadIdx.x != 0) return;
  atomicAdd(&query.num_larger, larger);
  __threadfence();
  const uint32_t num_before = atomicAdd(&query.num_counted, 1u);
  if (num_before + 1 != static_cast<uint32_t>(pieces.count)) return;
  out[q] = {logit, 1 + static_cast<int32_t>(atomicAdd(&query.num_larger, 0u))};
  query.num_larger = query.num_counted = 0;
}

}  // namespace

void report(ReportRow* rows, int64_t num_rows, const DrawRow* draw_rows, const DrawnRow* drawn,
            int64_t vocabulary, Report* out, TopEntry* top, cudaStream_t stream) {
  if (num_rows == 0) return;
  const RowPieces pieces = row_pieces(num_rows, vocabulary);
  launch_early("sample", report_kernel, blocks(num_rows * (pieces.count + 1)), kThreads, 0, stream,
               rows, draw_rows, drawn, static_cast<int32_t>(vocabulary), pieces, out, top);
}

void rank(RankQuery* queries, int64_t num_queries, const DrawnRow* drawn, int64_t vocabulary,
          Ranked* out, cudaStream_t stream) {
  if (num_queries == 0) return;
  const RowPieces pieces = row_pieces(num_queries, vocabulary);
  launch_early("sample", rank_kernel, blocks(num_queries * pieces.count), kThreads, 0, stream,
               queries, drawn, static_cast<int32_t>(vocabulary), pieces, out);
}

}  // namespace llmserve::cuda
