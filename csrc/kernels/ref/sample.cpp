#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/ref/ref_backend.h"
#include "kernels/ref/row_draw.h"
#include "kernels/ref/scalar_math.h"

namespace llmserve {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

float gumbel_noise(int32_t token_id, const SampleRow& row) {
  uint32_t bits[4];
  ref::u_token_bits(static_cast<uint32_t>(token_id) / 4, row.position, row.seed, bits);
  return ref::v_gumbel(bits[token_id % 4]);
}

#include "core/math/sigma.inc"

// The least z that top-n-sigma keeps of a row x.
float least_of_sigma(const std::vector<float>& x, float max, const DrawSettings& draw) {
  uint64_t count = 0, steps = 0, squares = 0;
  for (const float value : x) {
    if (value == kMinusInf) continue;
    const uint64_t below = sigma_steps(max - value);
    ++count;
    steps += below;
    squares += below * below;
  }
  return sigma_threshold(draw.top_n_sigma, count, steps, squares) / draw.temperature;
}

// The filters set the z of what they take out to -inf.
void keep_from(std::vector<float>& z, float least) {
  for (float& value : z)
    if (value < least) value = kMinusInf;
}

void keep_min_p(std::vector<float>& z, float min_p) {
  for (float& value : z)
    if (!(ref::v_exp(value) >= min_p)) value = kMinusInf;
}

void keep_top_k(std::vector<float>& z, int32_t k) {
  if (k <= 0 || static_cast<size_t>(k) >= z.size()) return;
  std::vector<float> sorted = z;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const float threshold = sorted[static_cast<size_t>(k) - 1];
  for (float& value : z)
    if (value < threshold) value = kMinusInf;
}

void keep_top_p(std::vector<float>& z, float top_p) {
  if (top_p >= 1.0f) return;
  std::vector<uint32_t> weights;
  uint64_t total = 0;
  for (const float value : z) {
    weights.push_back(static_cast<uint32_t>(ref::v_exp(value) * 0x1p30f));
    total += weights.back();
  }
  std::vector<uint32_t> sorted = weights;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const double target = static_cast<double>(top_p) * static_cast<double>(total);
  uint64_t mass = 0;
  uint32_t threshold = 0;
  for (const uint32_t weight : sorted) {
    mass += weight;
    threshold = weight;
    if (static_cast<double>(mass) >= target) break;
  }
  for (size_t i = 0; i < z.size(); ++i)
    if (weights[i] < threshold) z[i] = kMinusInf;
}

float penalized(float value, const TokenCount& count, const DrawSettings& draw) {
  value = value > 0 ? value / draw.repetition_penalty : value * draw.repetition_penalty;
  const float frequency = draw.frequency_penalty * static_cast<float>(count.num_generated);
  value -= frequency;
  if (count.num_generated > 0) value -= draw.presence_penalty;
  return value;
}

// The copy of a row that its token is drawn from.
std::vector<float> edited(const float* x, int64_t vocabulary, const SampleRow& row) {
  const float* start = row.draw_logits ? row.draw_logits.as<float>() : x;
  std::vector<float> z(start, start + vocabulary);
  for (const TokenBias& bias : row.biases) z[static_cast<size_t>(bias.token_id)] += bias.bias;
  for (size_t i = 0; i < z.size() && !row.allowed.empty(); ++i)
    if ((row.allowed[i / 32] >> (i % 32) & 1) == 0) z[i] = kMinusInf;
  for (const int32_t id : row.banned_token_ids)
    if (id >= 0 && id < vocabulary) z[static_cast<size_t>(id)] = kMinusInf;
  for (const TokenCount& count : row.counts) {
    float& value = z[static_cast<size_t>(count.token_id)];
    value = penalized(value, count, row.draw);
  }
  return z;
}

bool is_bad(float value) { return std::isnan(value) || value == -kMinusInf; }

bool can_draw(const float* x, int64_t vocabulary) {
  return std::none_of(x, x + vocabulary, is_bad) &&
         std::any_of(x, x + vocabulary, [](float value) { return value != kMinusInf; });
}

// Of edited logits, with a temperature that is not 0.
void filter(std::vector<float>& z, const DrawSettings& draw) {
  const float max = *std::max_element(z.begin(), z.end());
  const bool has_sigma = draw.top_n_sigma > 0;
  const float least = has_sigma ? least_of_sigma(z, max, draw) : kMinusInf;
  for (float& value : z) value = (value - max) / draw.temperature;
  if (has_sigma) keep_from(z, least);
  if (draw.min_p > 0) keep_min_p(z, draw.min_p);
  keep_top_k(z, draw.top_k);
  keep_top_p(z, draw.top_p);
}

int32_t draw(std::vector<float> z, const SampleRow& row) {
  if (!row.draw.is_greedy()) {
    filter(z, row.draw);
    for (size_t i = 0; i < z.size(); ++i) z[i] += gumbel_noise(static_cast<int32_t>(i), row);
  }
  return static_cast<int32_t>(std::max_element(z.begin(), z.end()) - z.begin());
}

// Reports the logprobs of the raw logits; double is allowed in the sum.
void report_logprobs(const float* x, int64_t vocabulary, const SampleRow& row, SampledRow& out) {
  const float max = *std::max_element(x, x + vocabulary);
  double sum = 0;
  for (int64_t i = 0; i < vocabulary; ++i) sum += static_cast<double>(ref::v_exp(x[i] - max));
  const float log_sum = static_cast<float>(std::log(sum));
  const auto report = [&](int32_t id) {
    const auto is_better = [&](float other) { return other > x[id]; };
    const auto num_better = std::count_if(x, x + vocabulary, is_better);
    return TopToken{id, x[id] - max - log_sum, 1 + static_cast<int32_t>(num_better)};
  };
  const auto best_first = [&](std::vector<int32_t> ids) {
    std::ranges::sort(ids);
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
    return ids;
  };
  const TopToken sampled = report(out.token_id);
  out.logprob = sampled.logprob;
  out.rank = sampled.rank;
  std::vector<int32_t> all(static_cast<size_t>(vocabulary));
  std::iota(all.begin(), all.end(), 0);
  std::vector<int32_t> top = best_first(std::move(all));
  top.resize(std::min(top.size(), static_cast<size_t>(row.num_top)));
  for (const int32_t id : top) out.top.push_back(report(id));
  const std::span<const int32_t> named = row.reported_token_ids;
  for (const int32_t id : best_first({named.begin(), named.end()}))
    out.reported.push_back(report(id));
}

void sample_row(const float* x, int64_t vocabulary, const SampleRow& row, SampledRow& out) {
  out = SampledRow{};
  out.token_id = row.forced_token_id;
  out.is_valid = out.is_raw_valid = can_draw(x, vocabulary);
  if (out.is_valid && row.forced_token_id < 0) {
    const std::vector<float> z = edited(x, vocabulary, row);
    out.is_valid = can_draw(z.data(), vocabulary);
    if (out.is_valid) out.token_id = draw(z, row);
  }
  if (out.is_valid && row.num_top >= 0) report_logprobs(x, vocabulary, row, out);
}

}  // namespace

bool ref::kept_logits(std::span<const float> logits, const SampleRow& row, std::vector<float>& z) {
  const int64_t vocabulary = std::ssize(logits);
  if (!can_draw(logits.data(), vocabulary)) return false;
  z = edited(logits.data(), vocabulary, row);
  if (!can_draw(z.data(), vocabulary)) return false;
  filter(z, row.draw);
  return true;
}

void RefBackend::do_sample(const SampleArgs& args) {
  for (int64_t s = 0; s < args.logits.shape[0]; ++s) {
    sample_row(args.logits.as<float>() + s * args.logits.strides[0], args.logits.shape[1],
               args.rows[static_cast<size_t>(s)], args.out[static_cast<size_t>(s)]);
  }
}

}  // namespace llmserve
