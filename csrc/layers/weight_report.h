// What the weights of a model take, by kind.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/backend.h"
#include "quant/linear_format.h"

namespace llmserve {

enum class WeightGroup : uint8_t { kEmbedding, kAttention, kMlp, kExperts, kNorm, kLmHead };
inline constexpr int kNumWeightGroups = 6;
std::string_view name(WeightGroup group);

// Weights that a checkpoint has quantized, and that are kept alike.
struct QuantizedUse {
  std::string stored;       // "GPTQ 4 bits, groups of 128"
  std::string runs;         // "as int4 g128, with activations rounded to 8 bits a token and group"
  int64_t num_weights = 0;  // tensors or parts of them
  bool operator==(const QuantizedUse&) const = default;
};

struct WeightReport {
  std::array<int64_t, kNumWeightGroups> group_bytes{};  // by WeightGroup
  int64_t mapped_bytes = 0;  // of them, read in place from the file: page cache, not memory
  std::vector<const LinearFormat*> integers;  // the formats that linear layers are in, if any
  // A row of activations as integers, beside the linear layer where it takes most; 0 if none runs
  // on integers.
  int64_t activation_bytes = 0;
  int64_t max_in_features = 0;    // K, of all linear layers
  int64_t num_experts = 0;        // of a layer, the most
  int64_t experts_per_token = 0;  // likewise
  GroupedShape grouped;           // of products of rows with weights of their own, if any
  // As EngineMetrics has them; 0 when planning.
  int64_t read_us = 0;
  int64_t pack_us = 0;
  std::vector<QuantizedUse> quantized;      // in the order of their first use
  std::vector<std::string> notes;           // what the checkpoint asks for and is done otherwise
  std::vector<std::string> unused_tensors;  // in the checkpoint, asked for by no layer; sorted
  int64_t total_bytes() const;
};

}  // namespace llmserve
