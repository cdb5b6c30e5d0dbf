#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/ref/ref_backend.h"
#include "kernels/ref/scalar_math.h"

namespace llmserve {
namespace {

constexpr float kGreedyTemperature = 1e-5f;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

float gumbel_noise(int32_t token_id, const SampleRow& row) {
  uint32_t bits[4];
  ref::u_token_bits(static_cast<uint32_t>(token_id) / 4, row.position, row.seed, bits);
  return ref::v_gumbel(bits[token_id % 4]);
}

// The filters set the z of what they take out to -inf.
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

// Reports the logprobs of the raw logits; double is allowed in the sum.
void report_logprobs(const float* x, int64_t vocabulary, int32_t num_top, SampledRow& out) {
  const float max = *std::max_element(x, x + vocabulary);
  double sum = 0;
  for (int64_t i = 0; i < vocabulary; ++i) sum += static_cast<double>(ref::v_exp(x[i] - max));
  const float log_sum = static_cast<float>(std::log(sum));
  const auto logprob = [&](int64_t i) { return x[i] - max - log_sum; };
  const auto rank = [&](int64_t i) {
    return 1 + static_cast<int32_t>(
                   std::count_if(x, x + vocabulary, [&](float other) { return other > x[i]; }));
  };
  out.logprob = logprob(out.token_id);
  out.rank = rank(out.token_id);
  std::vector<int32_t> ids(static_cast<size_t>(vocabulary));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
  ids.resize(std::min(ids.size(), static_cast<size_t>(num_top)));
  for (const int32_t id : ids) out.top.push_back({id, logprob(id), rank(id)});
}

void sample_row(const float* x, int64_t vocabulary, const SampleRow& row, SampledRow& out) {
  out = SampledRow{};
  std::vector<float> z(x, x + vocabulary);
  for (const int32_t id : row.banned_token_ids)
    if (id >= 0 && id < vocabulary) z[static_cast<size_t>(id)] = kMinusInf;
  const float max = *std::max_element(z.begin(), z.end());
  const auto is_bad = [](float value) { return std::isnan(value) || value == -kMinusInf; };
  out.is_valid = std::none_of(x, x + vocabulary, is_bad) && max != kMinusInf;
  if (!out.is_valid) return;

  std::vector<float> scores = z;
  if (row.temperature >= kGreedyTemperature) {
    for (float& value : z) value = (value - max) / row.temperature;
    if (row.min_p > 0) keep_min_p(z, row.min_p);
    keep_top_k(z, row.top_k);
    keep_top_p(z, row.top_p);
    for (size_t i = 0; i < z.size(); ++i)
      scores[i] = z[i] + gumbel_noise(static_cast<int32_t>(i), row);
  }
  out.token_id =
      static_cast<int32_t>(std::max_element(scores.begin(), scores.end()) - scores.begin());
  if (row.num_top >= 0) report_logprobs(x, vocabulary, row.num_top, out);
}

}  // namespace

void RefBackend::sample(const SampleArgs& args) {
  validate(args);
  for (int64_t s = 0; s < args.logits.shape[0]; ++s) {
    sample_row(args.logits.as<float>() + s * args.logits.strides[0], args.logits.shape[1],
               args.rows[static_cast<size_t>(s)], args.out[static_cast<size_t>(s)]);
  }
}

}  // namespace llmserve
