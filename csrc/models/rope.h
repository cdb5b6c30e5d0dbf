// Rotary position embeddings and their scalings: the parameters of a config, and the frequencies
// that follow from them. After transformers 5.23, modeling_rope_utils.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace llmserve {

enum class RopeType : uint8_t { kDefault, kLinear, kDynamic, kYarn, kLlama3 };
std::string_view name(RopeType type);

struct RopeParameters {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  double factor = 1.0;                           // all but default
  int64_t original_max_position_embeddings = 0;  // yarn, llama3
  std::optional<double> attention_factor;        // yarn; inferred from the factor if absent
  double beta_fast = 32.0;                       // yarn
  double beta_slow = 1.0;                        // yarn
  double mscale = 0.0;                           // yarn; 0: absent
  double mscale_all_dim = 0.0;                   // yarn; 0: absent
  bool truncate = true;                          // yarn
  double low_freq_factor = 1.0;                  // llama3
  double high_freq_factor = 4.0;                 // llama3

  bool operator==(const RopeParameters&) const = default;
};

// The angles of position p are p * inv_freq; cosines and sines are multiplied by attention_factor.
struct RopeFrequencies {
  std::vector<float> inv_freq;  // [rotary_dim / 2]
  float attention_factor = 1.0f;
};

// `max_model_len` matters to `dynamic` alone, whose base grows with the length: it is fixed once,
// at load, so that a token never depends on how long its sequence is at the moment.
RopeFrequencies compute_rope(const RopeParameters& rope, int64_t rotary_dim,
                             int64_t max_position_embeddings, int64_t max_model_len);

// The longest max_model_len for which the parameters mean something.
int64_t rope_max_len(const RopeParameters& rope, int64_t max_position_embeddings);

}  // namespace llmserve
