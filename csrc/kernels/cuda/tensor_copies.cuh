// Copies of boxes of a matrix from global to shared memory by the tensor memory accelerator of
// sm_90, and the barriers that count their bytes. PTX ISA, "cp.async.bulk.tensor" and "mbarrier".
// tests/cuda/emulator has a stand-in for each. A map (tensor_maps.h) says what the matrix and a box
// are; what lies beyond the matrix arrives as zeros. One thread asks for a copy.
#pragma once

#include <cuda.h>

#include "kernels/cuda/wgmma.cuh"

namespace llmserve::cuda {

#ifdef __CUDACC__
#define LLMSERVE_GRID_CONSTANT __grid_constant__
// Barriers that were made are seen by copies that begin after a barrier of the block.
__device__ __forceinline__ void show_phases() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives; the phase then ends only when that many bytes have been copied, too.
__device__ __forceinline__ void arrive_with_bytes(uint64_t* barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(num_bytes)
               : "memory");
}
// The box that begins there, innermost index first, to a multiple of 1,024 bytes.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, int i,
                                         int j) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4}], [%2];"
      :
      : "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(i), "r"(j)
      : "memory");
}
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, int i,
                                         int j, int k, int l) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(i), "r"(j), "r"(k),
        "r"(l)
      : "memory");
}
#else
#define LLMSERVE_GRID_CONSTANT
using emulator::arrive_with_bytes;
using emulator::copy_box;
inline void show_phases() {}
#endif

}  // namespace llmserve::cuda
