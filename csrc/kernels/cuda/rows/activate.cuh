// The activations, chosen as the kernel runs: a branch that all threads take alike.
#pragma once

#include "kernels/cuda/device_math.cuh"

namespace llmserve::cuda {

__device__ __forceinline__ float activate(Nonlinearity kind, float x) {
  if (kind == Nonlinearity::kSilu) return v_silu(x);
  if (kind == Nonlinearity::kGeluTanh) return v_gelu_tanh(x);
  if (kind == Nonlinearity::kGelu) return v_gelu(x);
  return kind == Nonlinearity::kRelu ? v_relu(x) : v_relu2(x);
}

}  // namespace llmserve::cuda
