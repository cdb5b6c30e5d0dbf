// The project's exp, log and noise for one thread, and sums over a block.
#pragma once

#include <cstdint>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.cuh"

namespace llmserve::cuda {

// The vector shim of one lane (core/math/scalar_lanes.inc says what it must have). The same bits as
// on the CPU: explicit fma, and the .cu files are compiled without contraction, flushing or fast
// division.
using Vec = float;
using IVec = int32_t;
using UVec = uint32_t;
__device__ __forceinline__ Vec v_fma(Vec a, Vec b, Vec c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ Vec v_splat(float x) { return x; }
__device__ __forceinline__ float s_sqrt(float x) { return sqrtf(x); }
__device__ __forceinline__ Vec v_max(Vec a, Vec b) { return a > b ? a : b; }
__device__ __forceinline__ Vec v_min(Vec a, Vec b) { return a < b ? a : b; }
__device__ __forceinline__ IVec v_bits(Vec x) { return __float_as_int(x); }
__device__ __forceinline__ Vec v_from_bits(IVec x) { return __int_as_float(x); }
__device__ __forceinline__ Vec v_to_float(IVec x) { return static_cast<float>(x); }
__device__ __forceinline__ UVec u_splat(uint32_t x) { return x; }
__device__ __forceinline__ IVec u_to_int(UVec x) { return static_cast<int32_t>(x); }
__device__ __forceinline__ void u_mul_wide(UVec a, uint32_t b, UVec* high, UVec* low) {
  *high = __umulhi(a, b);
  *low = a * b;
}

// The shared definitions are `static inline` and know nothing of devices.
#define inline __device__ __forceinline__
#include "core/math/exp.inc"
#include "core/math/fp8.inc"
#include "core/math/log.inc"
#include "core/math/noise.inc"
// What follows is made of them.
#include "kernels/activation_functions.inc"
#include "kernels/norm.inc"
#undef inline

// bf16 and f16 as bits; rounding as core/float_types.h does it, NaN's payload included.
__device__ __forceinline__ float bf16_to_float(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ __forceinline__ uint16_t float_to_bf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__device__ __forceinline__ float f16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return __uint_as_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return __uint_as_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // zero and subnormals
  return sign ? -magnitude : magnitude;
}

// Element i of memory that holds kStorage.
template <Storage kStorage>
__device__ __forceinline__ float load(const void* data, int64_t i) {
  if constexpr (kStorage == Storage::kF32) return static_cast<const float*>(data)[i];
  if constexpr (kStorage == Storage::kF8) return v_from_fp8(static_cast<const uint8_t*>(data)[i]);
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  if constexpr (kStorage == Storage::kBF16) return bf16_to_float(bits);
  return f16_to_float(bits);
}
template <Storage kStorage>
__device__ __forceinline__ void store(void* data, int64_t i, float value) {
  static_assert(kStorage == Storage::kF32 || kStorage == Storage::kBF16,
                "others are not stored so");
  if constexpr (kStorage == Storage::kF32)
    static_cast<float*>(data)[i] = value;
  else
    static_cast<uint16_t*>(data)[i] = float_to_bf16(value);
}

constexpr unsigned kAllLanes = 0xffffffffu;

// Butterflies: every lane gets the same bits, since a + b = b + a.
__device__ __forceinline__ float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
  for (int offset = 16; offset > 0; offset /= 2)
    value = v_max(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

// The sum over a block of whole warps, for every thread; all threads must call it. The order
// depends on the number of threads alone.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float partial[32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int num_warps = blockDim.x / 32;
  value = warp_sum(value);
  __syncthreads();  // an earlier call may still be reading
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  return warp_sum(lane < num_warps ? partial[lane] : 0.0f);
}

}  // namespace llmserve::cuda
