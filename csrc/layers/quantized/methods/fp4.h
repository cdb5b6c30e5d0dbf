// Weights of E2M1, two to a byte, which several methods write.
#pragma once

#include <memory>
#include <string_view>

#include "layers/quantized/coded_weight.h"

namespace llmserve {

// NVFP4: groups of 16 with E4M3 scales [N, K / 16] and an f32 of the tensor, which multiplies, or
// divides. `weight` is U8 [N, K / 2].
struct Nvfp4Names {
  std::string_view weight = "weight_packed";
  std::string_view global_scale = "weight_global_scale";
  bool divides = true;
};
std::shared_ptr<const QuantizedWeight> find_nvfp4_weight(ModuleTensors& tensors,
                                                         const Nvfp4Names& names);

// MXFP4: groups of 32 with powers of two. Rouhani et al. 2023. U8 weight [N, K / 2] and scales [N,
// K / 32], or of X matrices [X, N, K / 32, 16] and [X, N, K / 32].
std::shared_ptr<const QuantizedWeight> find_mxfp4_weight(ModuleTensors& tensors,
                                                         std::string_view weight,
                                                         std::string_view scale);

}  // namespace llmserve
