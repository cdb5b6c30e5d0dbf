// How kernels are started and what they find there. Compiled by nvcc this is CUDA; compiled by a
// plain C++ compiler it is tests/cuda/emulator, which runs the same kernels on the CPU, thread by
// thread, so that indices, barriers and arithmetic are tested where there is no GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/kernels.h"

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

// The same of a kernel all of whose threads call wait_for_previous(), before they write to global
// memory, read what a kernel of the step writes, or return. Lanes beside one that does may return
// without. What was there before the step's first kernel, as weights and the step's integers, they
// may read earlier.
template <class... Params, class... Args>
void launch_early(const char* name, void (*kernel)(Params...), dim3 grid, int threads,
                  size_t shared_bytes, cudaStream_t stream, const Args&... args) {
#ifdef __CUDACC__
  if (starts_early) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
    if (error != cudaSuccess) cudaGetLastError();  // or the next launch would be blamed for it
    check(name, error);
    return;
  }
#endif
  launch(name, kernel, grid, threads, shared_bytes, stream, args...);
}

// Returns when all that earlier kernels of the stream wrote is there; from then on the next kernel
// may start, which waits here, in its turn, for this one to end.
#ifdef __CUDACC__
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#else
inline void wait_for_previous() {}
#endif

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
