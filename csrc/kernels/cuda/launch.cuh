// How kernels are started and what they find there. Compiled by nvcc this is CUDA; compiled by a
// plain C++ compiler it is tests/cuda/emulator, which runs the same kernels on the CPU, thread by
// thread, so that indices, barriers and arithmetic are tested where there is no GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/cuda_check.h"

#ifdef __CUDACC__
// Aligned for vectors and copies of 16 bytes.
#define LLMSERVE_DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
#else
#include "emulator/device.h"
#endif

namespace llmserve::cuda {

// kernel(args...) on `grid` blocks of `threads`. Throws DeviceError, naming the op, if it cannot
// start; what goes wrong while it runs comes out of a later call.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, int threads,
            size_t shared_bytes, cudaStream_t stream, const Args&... args) {
#ifdef __CUDACC__
  kernel<<<grid, threads, shared_bytes, stream>>>(args...);
#else
  emulator::run(grid, threads, shared_bytes, stream, [=] { kernel(args...); });
#endif
  check(name, cudaGetLastError());
}

#ifdef __CUDACC__
// Seen by the host after all that this thread, and those it has met at a barrier after their
// fences, wrote before.
__device__ __forceinline__ void store_release(int64_t* to, int64_t value) {
  asm volatile("st.release.sys.global.s64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
#endif

// A grid of n blocks along x.
inline dim3 blocks(int64_t n) { return dim3(static_cast<unsigned>(n)); }

}  // namespace llmserve::cuda
