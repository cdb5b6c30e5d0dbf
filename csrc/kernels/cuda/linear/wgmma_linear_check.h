// Whether a GPU's products by wgmma can be believed: wgmma_product.cu beside mma_linear.cu, and
// each of its forms beside the others.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/linear/wgmma_product.h"

namespace llmserve::cuda {

// WgmmaLinear::run.
using WgmmaRun =
    std::function<void(const uint16_t* x, const LinearParams& params, const Activation* gate,
                       uint16_t* rounded, const WgmmaForm& form)>;

// What is wrong, or nothing. That an element of a wgmma depends neither on N nor on other columns,
// on which equal bits for any number of rows rest, is documented nowhere: the same rows run in
// every form and place. Takes and gives back some 2 MB. Throws DeviceError.
std::string find_wgmma_problem(const WgmmaRun& multiply, DeviceMemory& memory);

}  // namespace llmserve::cuda
