// GPTQ's tensors, which other methods write as well.
#pragma once

#include <cstdint>
#include <memory>

#include "io/json.h"
#include "layers/quantized/coded_weight.h"
#include "layers/quantized/module_names.h"

namespace llmserve {

struct GptqParams {
  int bits = 4;
  int64_t group = 128;        // elements of K; 0: all
  bool is_symmetric = true;   // the zero points are 2^(bits - 1), whatever the file has
  bool is_ordered = false;    // groups may be of scattered columns
  bool has_v2_zeros = false;  // the file has zero points themselves, instead of less 1
};

// -1 is all of K, and gives 0.
int64_t read_group_size(const JsonNode& node, int64_t fallback);

// A module with qweight, qzeros, scales and, perhaps, g_idx.
std::shared_ptr<const QuantizedWeight> find_gptq_weight(ModuleTensors& tensors,
                                                        const GptqParams& params);

}  // namespace llmserve
