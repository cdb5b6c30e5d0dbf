// Weights of E4M3 with scales, which several methods write.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "layers/quantized/coded_weight.h"

namespace llmserve {

// Blocks [rows, columns] of a matrix that share a scale.
struct BlockSize {
  int64_t rows = 0;  // 0: there are none
  int64_t columns = 0;
};

// A module whose weight [N, K] is E4M3, with a scale in the tensor `scale`, which multiplies: one,
// or one a row, or one a block, of which the last of a side may be partial. Activations are in E4M3
// by its scheme, or not (quant/fp8_activations.h).
std::shared_ptr<const QuantizedWeight> find_fp8_weight(ModuleTensors& tensors,
                                                       std::string_view scale,
                                                       const BlockSize& block, bool rounds_to_fp8);

// Throws CorruptFile unless the node is absent, null or two numbers.
BlockSize read_block_size(const JsonNode& node);

}  // namespace llmserve
