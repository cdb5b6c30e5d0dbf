#include "models/rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

namespace llmserve {
namespace {

// theta^(2i/d) as PyTorch has it: base and exponent are rounded to f32, and so is the power.
std::vector<float> powers(double theta, int64_t rotary_dim) {
  std::vector<float> out;
  for (int64_t i = 0; i < rotary_dim; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(rotary_dim);
    out.push_back(static_cast<float>(
        std::pow(static_cast<double>(static_cast<float>(theta)), static_cast<double>(exponent))));
  }
  return out;
}

std::vector<float> default_frequencies(double theta, int64_t rotary_dim) {
  std::vector<float> out = powers(theta, rotary_dim);
  for (float& value : out) value = 1.0f / value;
  return out;
}

// "NTK-aware" scaling: the base grows with the length.
double dynamic_theta(const RopeParameters& rope, int64_t rotary_dim,
                     int64_t max_position_embeddings, int64_t max_model_len) {
  const double original = static_cast<double>(max_position_embeddings);
  const double length = static_cast<double>(std::max(max_model_len, max_position_embeddings));
  const double dim = static_cast<double>(rotary_dim);
  return rope.theta *
         std::pow(rope.factor * length / original - (rope.factor - 1.0), dim / (dim - 2.0));
}

// Peng et al. 2023 (YaRN), section 3.2 and equations 17 to 22: frequencies that rotate often within
// the original context stay, those that rotate seldom are divided by the factor, a ramp between.
std::vector<float> yarn_frequencies(const RopeParameters& rope, int64_t rotary_dim) {
  const double dim = static_cast<double>(rotary_dim);
  const auto correction_dim = [&](double num_rotations) {
    return dim *
           std::log(static_cast<double>(rope.original_max_position_embeddings) /
                    (num_rotations * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(rope.theta));
  };
  double low = correction_dim(rope.beta_fast);
  double high = correction_dim(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  if (low == high) high += 0.001;  // no division by zero

  std::vector<float> out = powers(rope.theta, rotary_dim);
  for (size_t i = 0; i < out.size(); ++i) {
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f,
        1.0f);
    const float keep = 1.0f - ramp;
    const float interpolated = 1.0f / (static_cast<float>(rope.factor) * out[i]);
    const float extrapolated = 1.0f / out[i];
    out[i] = interpolated * (1.0f - keep) + extrapolated * keep;
  }
  return out;
}

double yarn_attention_factor(const RopeParameters& rope) {
  const auto scale = [&](double mscale) {
    return rope.factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(rope.factor) + 1.0;
  };
  if (rope.attention_factor) return *rope.attention_factor;
  if (rope.mscale != 0.0 && rope.mscale_all_dim != 0.0)
    return scale(rope.mscale) / scale(rope.mscale_all_dim);
  return scale(1.0);
}

// Llama 3.1: wavelengths longer than the original context are divided by the factor, short ones
// stay, and the ones between are blended.
std::vector<float> llama3_frequencies(const RopeParameters& rope, int64_t rotary_dim) {
  const float original = static_cast<float>(rope.original_max_position_embeddings);
  const float factor = static_cast<float>(rope.factor);
  const float low = static_cast<float>(rope.low_freq_factor);
  const float high = static_cast<float>(rope.high_freq_factor);
  std::vector<float> out = default_frequencies(rope.theta, rotary_dim);
  for (float& frequency : out) {
    const float wavelength = static_cast<float>(2.0 * std::numbers::pi) / frequency;
    if (wavelength > original / low) {
      frequency /= factor;
    } else if (wavelength >= original / high) {
      const float smooth = (original / wavelength - low) / (high - low);
      frequency = (1.0f - smooth) * frequency / factor + smooth * frequency;
    }
  }
  return out;
}

// Ding et al. 2024 (LongRoPE): a factor of its own for every pair, found by search.
std::vector<float> longrope_frequencies(const RopeParameters& rope, int64_t max_model_len) {
  const bool is_long = max_model_len > rope.original_max_position_embeddings;
  const std::vector<float>& factors = is_long ? rope.long_factors : rope.short_factors;
  std::vector<float> out = powers(rope.theta, rope.rotary_dim);
  for (size_t i = 0; i < out.size(); ++i) out[i] = 1.0f / (factors[i] * out[i]);
  return out;
}

double longrope_attention_factor(const RopeParameters& rope, int64_t max_model_len) {
  if (rope.long_attention_factor && max_model_len > rope.original_max_position_embeddings)
    return *rope.long_attention_factor;
  if (rope.attention_factor) return *rope.attention_factor;
  if (rope.factor <= 1.0) return 1.0;
  return std::sqrt(1.0 + std::log(rope.factor) /
                             std::log(static_cast<double>(rope.original_max_position_embeddings)));
}

}  // namespace

std::string_view name(RopeType type) {
  static constexpr std::array<std::string_view, kRopeTypes.size()> kNames{
      "default", "linear", "dynamic", "yarn", "llama3", "longrope"};
  return kNames[static_cast<size_t>(type)];
}

RopeFrequencies compute_rope(const RopeParameters& rope, int64_t max_position_embeddings,
                             int64_t max_model_len) {
  const int64_t rotary_dim = rope.rotary_dim;
  RopeFrequencies out;
  switch (rope.type) {
    case RopeType::kDefault:
      out.inv_freq = default_frequencies(rope.theta, rotary_dim);
      break;
    case RopeType::kLinear:
      out.inv_freq = default_frequencies(rope.theta, rotary_dim);
      for (float& value : out.inv_freq) value /= static_cast<float>(rope.factor);
      break;
    case RopeType::kDynamic:
      out.inv_freq = default_frequencies(
          dynamic_theta(rope, rotary_dim, max_position_embeddings, max_model_len), rotary_dim);
      break;
    case RopeType::kYarn:
      out.inv_freq = yarn_frequencies(rope, rotary_dim);
      out.attention_factor = static_cast<float>(yarn_attention_factor(rope));
      break;
    case RopeType::kLlama3:
      out.inv_freq = llama3_frequencies(rope, rotary_dim);
      break;
    case RopeType::kLongrope:
      out.inv_freq = longrope_frequencies(rope, max_model_len);
      out.attention_factor = static_cast<float>(longrope_attention_factor(rope, max_model_len));
      break;
  }
  return out;
}

int64_t rope_max_len(const RopeParameters& rope, int64_t max_position_embeddings) {
  const auto stretched = [&](int64_t original) {
    return std::max(max_position_embeddings,
                    static_cast<int64_t>(rope.factor * static_cast<double>(original)));
  };
  switch (rope.type) {
    case RopeType::kLinear:
    case RopeType::kDynamic:
      return stretched(max_position_embeddings);
    case RopeType::kYarn:
      return stretched(rope.original_max_position_embeddings);
    case RopeType::kDefault:
    case RopeType::kLlama3:
    case RopeType::kLongrope:
      return max_position_embeddings;
  }
  return max_position_embeddings;
}

}  // namespace llmserve
