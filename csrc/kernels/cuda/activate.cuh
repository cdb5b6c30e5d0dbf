// The activations, chosen as the kernel runs: a branch that all threads take alike.
#pragma once

#include "kernels/cuda/device_math.cuh"

namespace llmserve::cuda {

__device__ __forceinline__ float activate(Nonlinearity kind, float x) {
  if (kind == Nonlinearity::kSilu) return v_silu(x);
  return kind == Nonlinearity::kGeluTanh ? v_gelu_tanh(x) : v_gelu(x);
}

}  // namespace llmserve::cuda
