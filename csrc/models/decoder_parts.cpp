#include "models/decoder_parts.h"

#include <utility>

#include "core/error.h"

namespace llmserve {

const std::string& head_name(WeightLoader& weights, const ModelConfig& config) {
  const std::string& head = config.names.lm_head;
  // A tied checkpoint may still carry a copy of the head, which is used where it is a quantized
  // one.
  if (!config.tie_word_embeddings ||
      weights.is_quantized(head + ".weight", config.vocab_size, config.hidden_size))
    return head;
  weights.ignore(head + ".weight");
  return config.names.embedding;
}

LmHeadSpec lm_head_spec(const ModelConfig& config) {
  return {.vocab_size = config.vocab_size,
          .hidden_size = config.hidden_size,
          .bias = config.lm_head_bias ? config.names.lm_head + ".bias" : "",
          .scale = config.logit_scale,
          .soft_cap = config.logit_soft_cap};
}

std::optional<PositionEmbedding> position_embedding(WeightLoader& weights,
                                                    const ModelConfig& config) {
  if (config.names.positions.empty()) return std::nullopt;
  return PositionEmbedding(weights, config.names.positions, config.position_offset,
                           config.max_position_embeddings, config.hidden_size);
}

std::vector<Rotary> make_rotaries(const ModelConfig& config) {
  check_internal(config.ropes.size() <= kMaxRopes, "too many rotary embeddings");
  std::vector<Rotary> rotaries;
  for (const RopeParameters& rope : config.ropes) {
    RopeFrequencies frequencies =
        compute_rope(rope, config.max_position_embeddings, config.max_model_len);
    rotaries.emplace_back(
        std::move(frequencies.inv_freq), frequencies.attention_factor,
        QueryScaling{.growth = static_cast<float>(rope.query_growth),
                     .period = static_cast<int32_t>(rope.original_max_position_embeddings)});
  }
  return rotaries;
}

RotaryTableSet make_tables(std::span<const Rotary> rotaries, const ForwardContext& context) {
  RotaryTableSet tables;
  for (size_t i = 0; i < rotaries.size(); ++i) tables[i] = rotaries[i].make_tables(context);
  return tables;
}

}  // namespace llmserve
