// AWQ's tensors, which other methods write as well.
#pragma once

#include <cstdint>
#include <memory>

#include "layers/quantized/coded_weight.h"
#include "layers/quantized/module_names.h"

namespace llmserve {

struct AwqParams {
  int64_t group = 128;   // elements of K; 0: all
  bool is_gemv = false;  // packed along K
};

// A module with qweight, qzeros and scales.
std::shared_ptr<const QuantizedWeight> find_awq_weight(ModuleTensors& tensors,
                                                       const AwqParams& params);

}  // namespace llmserve
