// The parts of a decoder beside its layers, as a ModelConfig says: for the decoder, and for whoever
// runs layers one at a time.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layers/embedding.h"
#include "layers/lm_head.h"
#include "layers/rotary.h"
#include "models/model_config.h"

namespace llmserve {

// The name of the head's matrix; of a tied one that is the embedding's.
const std::string& head_name(WeightLoader& weights, const ModelConfig& config);
LmHeadSpec lm_head_spec(const ModelConfig& config);

// Learned positions, if the model has them.
std::optional<PositionEmbedding> position_embedding(WeightLoader& weights,
                                                    const ModelConfig& config);

// [config.ropes]
std::vector<Rotary> make_rotaries(const ModelConfig& config);

// The tables of a step, in the arena scope of the caller; as many as there are rotaries are set.
using RotaryTableSet = std::array<RotaryTables, kMaxRopes>;
RotaryTableSet make_tables(std::span<const Rotary> rotaries, const ForwardContext& context);

// What layer `layer_idx` rotates by.
inline RotaryTables layer_tables(const RotaryTableSet& tables, const ModelConfig& config,
                                 size_t layer_idx) {
  const int32_t rope = config.layers[layer_idx].rope;
  return rope < 0 ? RotaryTables{} : tables[static_cast<size_t>(rope)];
}

}  // namespace llmserve
