// What a warpgroup, four warps of neighbouring numbers, does on sm_90a: products whose operands lie
// in shared memory and which go on while others compute; and barriers in shared memory that hold
// those apart who fill it and who read it. PTX ISA, "Asynchronous warpgroup level matrix
// instructions" and "mbarrier". tests/cuda/emulator has a stand-in for each.
//
// A product takes c [64, N] += a [64, 16] b [16, N]. Warp w of the warpgroup has rows 16 w ...
// 16 w + 15, whose fragments are those of mma.cuh: of c N / 8 fragments of C side by side, of a one
// of A. What a descriptor names is a matrix in shared memory, in rows of 128 bytes whose pieces of
// 16 bytes are swizzled: piece i of row r lies at i ^ (r % 8). Such rows begin at multiples of
// 1,024 bytes from eight to eight. Wider matrices have blocks of 64 columns, one after another.
#pragma once

#include "kernels/cuda/mma.cuh"

namespace llmserve::cuda {

// Where a piece of 16 bytes of a row of 64 bf16 lies, in bytes from the block of columns on.
__device__ __forceinline__ int swizzled(int row, int piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}

// A matrix whose rows or columns, the ones beside each other in memory, begin there. Of operands
// along K (a, and b as its transpose [N, 16]): the next eight rows are 1,024 bytes further on. Of b
// as it is, [16, N]: that, and the next 64 columns `block_bytes`.
__device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t block_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{block_bytes >> 4} << 16 | (address & 0x3ffffu) >> 4;
}
// The same, so many bytes further on.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) {
  return descriptor + static_cast<uint64_t>(bytes >> 4);
}

#ifdef __CUDACC__
// Before the first product, and again once registers of one have been written to: they are settled.
__device__ __forceinline__ void settle_registers() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Closes the products since the last call as one group.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all but the last kGroups groups are done: their registers may be read, and what they read
// may be written.
template <int kGroups>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kGroups) : "memory");
}
// No access to these registers is moved across.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&registers)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kCount; ++i) asm volatile("" : "+r"(registers[i / 4][i % 4])::"memory");
}

#define LLMSERVE_C8(i)                                                                \
  "+f"(c[i]), "+f"(c[(i) + 1]), "+f"(c[(i) + 2]), "+f"(c[(i) + 3]), "+f"(c[(i) + 4]), \
      "+f"(c[(i) + 5]), "+f"(c[(i) + 6]), "+f"(c[(i) + 7])
#define LLMSERVE_C32 LLMSERVE_C8(0), LLMSERVE_C8(8), LLMSERVE_C8(16), LLMSERVE_C8(24)
#define LLMSERVE_C64 \
  LLMSERVE_C32, LLMSERVE_C8(32), LLMSERVE_C8(40), LLMSERVE_C8(48), LLMSERVE_C8(56)
#define LLMSERVE_NAMES32                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LLMSERVE_NAMES64                                                                    \
  LLMSERVE_NAMES32                                                                          \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// c += a b^T, or c = a b^T where it does not accumulate: a [64, 16], b [N, 16], N = 128 and less.
__device__ __forceinline__ void multiply_rows(float (&c)[64], uint64_t a, uint64_t b,
                                              bool accumulates) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LLMSERVE_NAMES64
      "}, %64, %65, p, 1, 1, 0, 0;\n}"
      : LLMSERVE_C64
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)));
}
__device__ __forceinline__ void multiply_rows(float (&c)[32], uint64_t a, uint64_t b,
                                              bool accumulates) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LLMSERVE_NAMES32
      "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : LLMSERVE_C32
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)));
}
__device__ __forceinline__ void multiply_rows(float (&c)[16], uint64_t a, uint64_t b,
                                              bool accumulates) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
      "%9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}"
      : LLMSERVE_C8(0), LLMSERVE_C8(8)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)));
}
__device__ __forceinline__ void multiply_rows(float (&c)[8], uint64_t a, uint64_t b,
                                              bool accumulates) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, "
      "%9, p, 1, 1, 0, 0;\n}"
      : LLMSERVE_C8(0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)));
}
__device__ __forceinline__ void multiply_rows(float (&c)[4], uint64_t a, uint64_t b,
                                              bool accumulates) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, "
      "0;\n}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)));
}
// The same of a in registers and b [16, N] as it is: N = 128, and N = 64.
__device__ __forceinline__ void multiply_columns(float (&c)[64], const uint32_t (&a)[4], uint64_t b,
                                                 bool accumulates) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LLMSERVE_NAMES64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
      : LLMSERVE_C64
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulates)));
}
__device__ __forceinline__ void multiply_columns(float (&c)[32], const uint32_t (&a)[4], uint64_t b,
                                                 bool accumulates) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LLMSERVE_NAMES32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
      : LLMSERVE_C32
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulates)));
}
#undef LLMSERVE_C8
#undef LLMSERVE_C32
#undef LLMSERVE_C64
#undef LLMSERVE_NAMES32
#undef LLMSERVE_NAMES64

// Registers a thread of this warpgroup may use from here on; others' add up with them to what the
// block began with.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kCount));
}

// What this thread has written to shared memory, copies that are done included, is seen by products
// that begin after a barrier.
__device__ __forceinline__ void show_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier in shared memory, of phases: `count` arrivals end one. A thread sees that it may use it
// after a __syncthreads().
__device__ __forceinline__ void init_phases(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(count)
               : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(barrier))
               : "memory");
}
// Until the phase of this parity, 0 for the first, has ended; the one before the first has.
__device__ __forceinline__ void await_phase(uint64_t* barrier, int parity) {
  const uint32_t address = shared_address(barrier);
  uint32_t is_done = 0;
  while (is_done == 0) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(is_done)
        : "r"(address), "r"(parity)
        : "memory");
  }
}

// Barriers 1 to 15 of the block, of `threads` of it, whole warps: meet_some() waits until as many
// have come, arrive_some() does not.
__device__ __forceinline__ void meet_some(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_some(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}
#else
using emulator::arrive;
using emulator::arrive_some;
using emulator::await_phase;
using emulator::commit_products;
using emulator::init_phases;
using emulator::meet_some;
using emulator::multiply_columns;
using emulator::multiply_rows;
using emulator::settle_registers;
using emulator::shared_address;
using emulator::show_to_products;
template <int kGroups>
void wait_for_products() {
  emulator::wait_for_products(kGroups);
}
template <int kCount>
void pin(float (&)[kCount]) {}
template <int kCount>
void pin(uint32_t (&)[kCount][4]) {}
template <int kCount>
void take_registers() {}
template <int kCount>
void give_registers() {}
#endif

}  // namespace llmserve::cuda
