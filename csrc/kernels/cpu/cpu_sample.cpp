// Sampling: rows go to threads; filters narrow z, and then the noise decides.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/threshold.h"

namespace llmserve {
namespace {

constexpr float kGreedyTemperature = 1e-5f;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

struct SampleScratch {
  float* z;
  uint32_t* keys;
  uint32_t* selected;
};

// What the filters take out becomes -inf.
void keep_top_k(const SampleScratch& s, int64_t n, int32_t k) {
  if (k <= 0 || k >= n) return;
  for (int64_t i = 0; i < n; ++i) s.keys[i] = ordered_key(s.z[i]);
  const uint32_t key =
      count_threshold({s.keys, static_cast<size_t>(n)}, static_cast<uint64_t>(k), s.selected);
  const float threshold = from_ordered_key(key);
  for (int64_t i = 0; i < n; ++i) s.z[i] = s.z[i] < threshold ? kMinusInf : s.z[i];
}

void keep_top_p(const cpu::KernelTable& kernels, const SampleScratch& s, int64_t n, float top_p) {
  if (top_p >= 1.0f) return;
  kernels.weights(s.z, n, s.keys);
  uint64_t total = 0;
  for (int64_t i = 0; i < n; ++i) total += s.keys[i];
  const double target = std::ceil(static_cast<double>(top_p) * static_cast<double>(total));
  const uint32_t threshold =
      weight_threshold({s.keys, static_cast<size_t>(n)},
                       std::max<uint64_t>(1, static_cast<uint64_t>(target)), s.selected);
  for (int64_t i = 0; i < n; ++i) s.z[i] = s.keys[i] < threshold ? kMinusInf : s.z[i];
}

int64_t draw(const cpu::KernelTable& kernels, const float* x, int64_t n, const cpu::RowMax& largest,
             const SampleRow& row, const SampleScratch& s) {
  kernels.scale_logits(x, n, largest.max, row.temperature, s.z);
  if (row.min_p > 0) kernels.keep_min_p(s.z, n, row.min_p);
  keep_top_k(s, n, row.top_k);
  keep_top_p(kernels, s, n, row.top_p);
  return kernels.gumbel_argmax(s.z, n, row.seed, row.position, largest.idx);
}

// The best `top.size()` tokens, best first; a heap of them is kept with the worst in front, and
// only logits above it are looked at.
void find_top(const cpu::KernelTable& kernels, const float* x, int64_t n,
              std::vector<TopToken>& top) {
  if (top.empty()) return;
  const auto is_better = [&](const TopToken& a, const TopToken& b) {
    return x[a.token_id] != x[b.token_id] ? x[a.token_id] > x[b.token_id] : a.token_id < b.token_id;
  };
  for (size_t i = 0; i < top.size(); ++i) top[i].token_id = static_cast<int32_t>(i);
  std::make_heap(top.begin(), top.end(), is_better);
  int64_t i = static_cast<int64_t>(top.size());
  while ((i = kernels.next_greater(x, i, n, x[top.front().token_id])) < n) {
    std::pop_heap(top.begin(), top.end(), is_better);
    top.back().token_id = static_cast<int32_t>(i++);
    std::push_heap(top.begin(), top.end(), is_better);
  }
  std::sort_heap(top.begin(), top.end(), is_better);
}

void report_logprobs(const cpu::KernelTable& kernels, const float* x, int64_t n, float max,
                     SampledRow& out) {
  const float log_sum = kernels.log_sum_exp(x, n, max);
  out.logprob = x[out.token_id] - max - log_sum;
  out.rank = 1;
  for (int64_t i = 0; i < n; ++i) out.rank += x[i] > x[out.token_id] ? 1 : 0;
  find_top(kernels, x, n, out.top);
  for (size_t i = 0; i < out.top.size(); ++i) {
    TopToken& token = out.top[i];
    token.logprob = x[token.token_id] - max - log_sum;
    const bool is_tied = i > 0 && x[out.top[i - 1].token_id] == x[token.token_id];
    token.rank = is_tied ? out.top[i - 1].rank : static_cast<int32_t>(i) + 1;
  }
}

void sample_row(const cpu::KernelTable& kernels, const float* x, int64_t n, const SampleRow& row,
                const SampleScratch& s, SampledRow& out) {
  const cpu::RowMax raw = kernels.row_max(x, n);
  const float* allowed = x;
  cpu::RowMax largest = raw;
  if (!row.banned_token_ids.empty()) {
    std::copy(x, x + n, s.z);
    for (const int32_t id : row.banned_token_ids)
      if (id >= 0 && id < n) s.z[id] = kMinusInf;
    allowed = s.z;
    largest = kernels.row_max(s.z, n);
  }
  out.is_valid = raw.has_no_bad && largest.max != kMinusInf;
  if (!out.is_valid) {
    out.top.clear();
    return;
  }
  const int64_t token = row.temperature < kGreedyTemperature
                            ? largest.idx
                            : draw(kernels, allowed, n, largest, row, s);
  out.token_id = static_cast<int32_t>(token);
  if (row.num_top >= 0) report_logprobs(kernels, x, n, raw.max, out);
}

}  // namespace

void CpuBackend::sample(const SampleArgs& args) {
  validate(args);
  const int64_t n = args.logits.shape[1];
  for (size_t i = 0; i < args.out.size(); ++i) {  // here, since threads may not throw
    args.out[i] = SampledRow{};
    args.out[i].top.resize(static_cast<size_t>(std::clamp<int64_t>(args.rows[i].num_top, 0, n)));
  }
  reserve_scratch(n * 3 * static_cast<int64_t>(sizeof(float)));
  pool_.parallel_for(args.logits.shape[0], 1, [&](int64_t begin, int64_t end, int thread_idx) {
    auto* memory = reinterpret_cast<float*>(scratch(thread_idx));
    const SampleScratch s{memory, reinterpret_cast<uint32_t*>(memory + n),
                          reinterpret_cast<uint32_t*>(memory + 2 * n)};
    for (int64_t r = begin; r < end; ++r) {
      sample_row(kernels_, args.logits.as<float>() + r * args.logits.strides[0], n,
                 args.rows[static_cast<size_t>(r)], s, args.out[static_cast<size_t>(r)]);
    }
  });
}

}  // namespace llmserve
