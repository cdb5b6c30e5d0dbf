// Rotary position embeddings and their scalings: the parameters of a config, and the frequencies
// that follow from them. After transformers 5.23, modeling_rope_utils.py.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace llmserve {

enum class RopeType : uint8_t { kDefault, kLinear, kDynamic, kYarn, kLlama3, kLongrope };
inline constexpr std::array kRopeTypes{RopeType::kDefault, RopeType::kLinear, RopeType::kDynamic,
                                       RopeType::kYarn,    RopeType::kLlama3, RopeType::kLongrope};
std::string_view name(RopeType type);

struct RopeParameters {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  int64_t rotary_dim = 0;                        // d: elements of a head that rotate; even
  double factor = 1.0;                           // all but default
  int64_t original_max_position_embeddings = 0;  // yarn, llama3, longrope
  std::optional<double> attention_factor;        // yarn, longrope; else follows from the factor
  std::optional<double> long_attention_factor;   // longrope, beyond the original length
  double beta_fast = 32.0;                       // yarn
  double beta_slow = 1.0;                        // yarn
  double mscale = 0.0;                           // yarn; 0: absent
  double mscale_all_dim = 0.0;                   // yarn; 0: absent
  bool truncate = true;                          // yarn
  double low_freq_factor = 1.0;                  // llama3
  double high_freq_factor = 4.0;                 // llama3
  double query_growth = 0.0;                     // queries, by the original length: QueryScaling
  std::vector<float> short_factors;              // longrope: [d / 2], up to the original length
  std::vector<float> long_factors;               // longrope: [d / 2], beyond it

  bool operator==(const RopeParameters&) const = default;
};

// The angles of position p are p * inv_freq; cosines and sines are multiplied by attention_factor.
struct RopeFrequencies {
  std::vector<float> inv_freq;  // [d / 2]
  float attention_factor = 1.0f;
};

// `max_model_len` matters to `dynamic`, whose base grows with the length, and to `longrope`, which
// has factors for lengths up to the original one and others beyond: the choice is made once, at
// load, so that a token never depends on how long its sequence is at the moment.
RopeFrequencies compute_rope(const RopeParameters& rope, int64_t max_position_embeddings,
                             int64_t max_model_len);

// The longest max_model_len for which the parameters mean something.
int64_t rope_max_len(const RopeParameters& rope, int64_t max_position_embeddings);

}  // namespace llmserve
