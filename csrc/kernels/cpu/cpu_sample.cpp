// Sampling: rows go to threads; edits and filters narrow z, and then the noise decides.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/threshold.h"

namespace llmserve {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

struct SampleScratch {
  float* z;
  uint32_t* keys;
  uint32_t* selected;
};

bool has_edits(const SampleRow& row) {
  return row.draw_logits || !row.biases.empty() || !row.allowed.empty() ||
         !row.banned_token_ids.empty() || !row.counts.empty();
}

float penalized(float value, const TokenCount& count, const DrawSettings& draw) {
  value = value > 0 ? value / draw.repetition_penalty : value * draw.repetition_penalty;
  value -= draw.frequency_penalty * static_cast<float>(count.num_generated);
  return count.num_generated > 0 ? value - draw.presence_penalty : value;
}

void edit(const cpu::KernelTable& kernels, const float* x, int64_t n, const SampleRow& row,
          float* z) {
  const float* start = row.draw_logits ? row.draw_logits.as<float>() : x;
  std::copy(start, start + n, z);
  for (const TokenBias& bias : row.biases) z[bias.token_id] += bias.bias;
  if (!row.allowed.empty()) kernels.keep_allowed(z, n, row.allowed.data());
  for (const int32_t id : row.banned_token_ids)
    if (id >= 0 && id < n) z[id] = kMinusInf;
  for (const TokenCount& count : row.counts)
    z[count.token_id] = penalized(z[count.token_id], count, row.draw);
}

#include "core/math/sigma.inc"

// The least z that top-n-sigma keeps of a row x.
float least_of_sigma(const float* x, int64_t n, float max, const DrawSettings& draw) {
  uint64_t count = 0, steps = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool is_finite = x[i] != kMinusInf;
    const uint64_t below = is_finite ? sigma_steps(max - x[i]) : 0;
    count += is_finite ? 1 : 0;
    steps += below;
    squares += below * below;
  }
  return sigma_threshold(draw.top_n_sigma, count, steps, squares) / draw.temperature;
}

// What the filters take out becomes -inf.
void keep_from(const SampleScratch& s, int64_t n, float least) {
  for (int64_t i = 0; i < n; ++i) s.z[i] = s.z[i] < least ? kMinusInf : s.z[i];
}

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
  const bool has_sigma = row.draw.top_n_sigma > 0;
  const float least = has_sigma ? least_of_sigma(x, n, largest.max, row.draw) : kMinusInf;
  kernels.scale_logits(x, n, largest.max, row.draw.temperature, s.z);
  if (has_sigma) keep_from(s, n, least);
  if (row.draw.min_p > 0) kernels.keep_min_p(s.z, n, row.draw.min_p);
  keep_top_k(s, n, row.draw.top_k);
  keep_top_p(kernels, s, n, row.draw.top_p);
  return kernels.gumbel_argmax(s.z, n, row.seed, row.position, largest.idx);
}

struct IsBetter {
  const float* x;
  bool operator()(const TopToken& a, const TopToken& b) const {
    return x[a.token_id] != x[b.token_id] ? x[a.token_id] > x[b.token_id] : a.token_id < b.token_id;
  }
};

// The best `top.size()` tokens, best first; a heap of them is kept with the worst in front, and
// only logits above it are looked at.
void find_top(const cpu::KernelTable& kernels, const float* x, int64_t n,
              std::vector<TopToken>& top) {
  if (top.empty()) return;
  const IsBetter is_better{x};
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

// Ranks of `reported`, best first, in one pass: a token of the row stands before all those that it
// beats, so it is counted at the first of them.
void rank_reported(const cpu::KernelTable& kernels, const float* x, int64_t n,
                   std::vector<TopToken>& reported) {
  if (reported.empty()) return;
  const float worst = x[reported.back().token_id];
  for (TopToken& token : reported) token.rank = 0;
  for (int64_t i = 0; (i = kernels.next_greater(x, i, n, worst)) < n; ++i) {
    const auto first_beaten = std::partition_point(
        reported.begin(), reported.end(), [&](const TopToken& t) { return x[t.token_id] >= x[i]; });
    ++first_beaten->rank;
  }
  int32_t rank = 1;
  for (TopToken& token : reported) token.rank = rank += token.rank;
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
  std::sort(out.reported.begin(), out.reported.end(), IsBetter{x});
  rank_reported(kernels, x, n, out.reported);
  for (TopToken& token : out.reported) token.logprob = x[token.token_id] - max - log_sum;
}

// Picks the row's token; false if there is none to pick.
bool choose(const cpu::KernelTable& kernels, const float* x, int64_t n, const cpu::RowMax& raw,
            const SampleRow& row, const SampleScratch& s, int32_t& token_id) {
  token_id = row.forced_token_id;
  if (token_id >= 0) return true;
  cpu::RowMax largest = raw;
  if (has_edits(row)) {
    edit(kernels, x, n, row, s.z);
    x = s.z;
    largest = kernels.row_max(x, n);
    if (!largest.has_no_bad || largest.max == kMinusInf) return false;
  }
  token_id = static_cast<int32_t>(row.draw.is_greedy() ? largest.idx
                                                       : draw(kernels, x, n, largest, row, s));
  return true;
}

void sample_row(const cpu::KernelTable& kernels, const float* x, int64_t n, const SampleRow& row,
                const SampleScratch& s, SampledRow& out) {
  const cpu::RowMax raw = kernels.row_max(x, n);
  out.is_raw_valid = raw.has_no_bad && raw.max != kMinusInf;
  out.is_valid = out.is_raw_valid && choose(kernels, x, n, raw, row, s, out.token_id);
  if (!out.is_valid) {
    out.top.clear();
    out.reported.clear();
  } else if (row.num_top >= 0) {
    report_logprobs(kernels, x, n, raw.max, out);
  }
}

}  // namespace

void CpuBackend::do_sample(const SampleArgs& args) {
  const int64_t n = args.logits.shape[1];
  for (size_t i = 0; i < args.out.size(); ++i) {  // here, since threads may not throw
    const SampleRow& row = args.rows[i];
    args.out[i] = SampledRow{};
    args.out[i].top.resize(static_cast<size_t>(std::clamp<int64_t>(row.num_top, 0, n)));
    if (row.num_top < 0) continue;
    for (const int32_t id : row.reported_token_ids)
      args.out[i].reported.push_back({.token_id = id});
  }
  workers_.reserve_scratch_floats(3 * n);
  workers_.pool().parallel_for(
      args.logits.shape[0], 1, [&](int64_t begin, int64_t end, int thread_idx) {
        auto* memory = workers_.scratch<float>(thread_idx);
        const SampleScratch s{memory, reinterpret_cast<uint32_t*>(memory + n),
                              reinterpret_cast<uint32_t*>(memory + 2 * n)};
        for (int64_t r = begin; r < end; ++r) {
          sample_row(workers_.kernels(), args.logits.as<float>() + r * args.logits.strides[0], n,
                     args.rows[static_cast<size_t>(r)], s, args.out[static_cast<size_t>(r)]);
        }
      });
}

}  // namespace llmserve
