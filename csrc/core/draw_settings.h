// How a token is drawn from its row of logits: one struct from admission to the kernels.
#pragma once

#include <cstdint>

namespace llmserve {

// Below this temperature the choice is greedy.
inline constexpr float kGreedyTemperature = 1e-5f;

// The row x [V] is edited first, in f32 and operation by operation: for a token that the sequence
// has, x_i / r or, unless x_i > 0, x_i * r with r the repetition penalty; then x_i -=
// frequency_penalty * its times in the output; then x_i -= presence_penalty if it is there.
// Repetition: Keskar et al. 2019, section 4.1.
//
// Then z = (x - max x) / temperature; then top-n-sigma (keep z >= -n times the standard deviation
// of the finite x, over the temperature: core/math/sigma.inc), min-p (keep exp(z) >= min_p), top-k
// (keep z >= the k-th largest; ties at the threshold stay), top-p (of what is left: keep the tokens
// whose weight is at least the largest threshold at which the kept mass reaches top_p of the whole;
// weights are floor(exp(z) * 2^30), so that no order of summation matters).
struct DrawSettings {
  float temperature = 1.0f;  // under kGreedyTemperature greedy, ties to the lowest id
  int32_t top_k = 0;         // <= 0: all
  float top_p = 1.0f;
  float min_p = 0.0f;               // relative to the most likely token
  float top_n_sigma = 0.0f;         // 0: all
  float repetition_penalty = 1.0f;  // for tokens of prompt and output
  float frequency_penalty = 0.0f;   // for each time in the output
  float presence_penalty = 0.0f;    // once for a token of the output

  bool is_greedy() const { return temperature < kGreedyTemperature; }
  bool has_penalties() const {
    return presence_penalty != 0 || frequency_penalty != 0 || repetition_penalty != 1;
  }
  // Throws InvalidArgument that names the field, the range and the value.
  void validate() const;
};

template <class Value>
struct DrawField {
  const char* name;
  Value DrawSettings::* member;
  bool (*is_valid)(Value);
  const char* rule;  // "name must be …"
};

// visit(DrawField) for each field: what takes settings by name, or checks them, needs no other
// list.
template <class Visit>
void for_each_draw_field(const Visit& visit) {
  const auto within_2 = [](float x) { return x >= -2 && x <= 2; };
  constexpr float kInfinity = __builtin_inff();
  visit(DrawField<float>{"presence_penalty", &DrawSettings::presence_penalty, within_2,
                         "presence_penalty must be between -2 and 2"});
  visit(DrawField<float>{"frequency_penalty", &DrawSettings::frequency_penalty, within_2,
                         "frequency_penalty must be between -2 and 2"});
  visit(DrawField<float>{"repetition_penalty", &DrawSettings::repetition_penalty,
                         [](float x) { return x > 0 && x < kInfinity; },
                         "repetition_penalty must be finite and more than 0"});
  visit(DrawField<float>{"temperature", &DrawSettings::temperature,
                         [](float x) { return x >= 0 && x < kInfinity; },
                         "temperature must be finite and at least 0"});
  visit(DrawField<float>{"top_p", &DrawSettings::top_p, [](float x) { return x > 0 && x <= 1; },
                         "top_p must be in (0, 1]"});
  visit(DrawField<int32_t>{"top_k", &DrawSettings::top_k, [](int32_t k) { return k >= -1; },
                           "top_k must be 0 or -1 (all) or positive"});
  visit(DrawField<float>{"min_p", &DrawSettings::min_p, [](float x) { return x >= 0 && x <= 1; },
                         "min_p must be in [0, 1]"});
  visit(DrawField<float>{"top_n_sigma", &DrawSettings::top_n_sigma,
                         [](float x) { return x >= 0 && x < kInfinity; },
                         "top_n_sigma must be finite and at least 0"});
}

}  // namespace llmserve
