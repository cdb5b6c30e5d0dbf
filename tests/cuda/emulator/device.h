// CUDA's words for a plain C++ compiler. A block's threads are fibers of one thread of the CPU; a
// fiber runs until it waits for others at a barrier or in a shuffle.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#undef __shared__
#undef __launch_bounds__
#define __shared__ static
#define __launch_bounds__(...)
#define LLMSERVE_DYNAMIC_SHARED(type, name) \
  type* name = static_cast<type*>(::llmserve::cuda::emulator::dynamic_shared)

namespace llmserve::cuda::emulator {

// Runs body() once a thread, block after block, when its turn in the stream comes (streams.h).
void run(dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
         std::function<void()> body);

extern uint3 thread_idx;
extern uint3 block_idx;
extern dim3 block_dim;
extern dim3 grid_dim;
extern void* dynamic_shared;

void sync_threads();
int sync_threads_or(int value);
// The 8 bytes that a lane of the calling warp shows: `lane ^ mask`, or lane `from`.
uint64_t shuffle_xor(uint64_t value, int mask);
uint64_t shuffle(uint64_t value, int from);

// What a warp does as one, by the tables of the PTX ISA; csrc/kernels/cuda/mma.cuh says what.
void load_matrices(uint32_t (&to)[4], const uint16_t* row);
void load_transposed(uint32_t (&to)[4], const uint16_t* row);
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void multiply_integers(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void multiply_integers(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t b);
// Done when the thread waits for it: for all, or for all but its last so many groups.
void copy_async(void* to, const void* from, bool is_there);
void commit_copies();
void wait_for_copies();
void wait_for_copies(int num_groups);

// What a warpgroup does as one and barriers of parts of a block; csrc/kernels/cuda/wgmma.cuh says
// what.
void settle_registers();
void commit_products();
void wait_for_products(int num_groups);
void multiply_rows(float (&c)[64], uint64_t a, uint64_t b, bool accumulates);
void multiply_rows(float (&c)[32], uint64_t a, uint64_t b, bool accumulates);
void multiply_rows(float (&c)[16], uint64_t a, uint64_t b, bool accumulates);
void multiply_rows(float (&c)[8], uint64_t a, uint64_t b, bool accumulates);
void multiply_rows(float (&c)[4], uint64_t a, uint64_t b, bool accumulates);
void multiply_columns(float (&c)[64], const uint32_t (&a)[4], uint64_t b, bool accumulates);
void multiply_columns(float (&c)[32], const uint32_t (&a)[4], uint64_t b, bool accumulates);
void show_to_products();
uint32_t shared_address(const void* data);
void init_phases(uint64_t* barrier, int count);
void arrive(uint64_t* barrier);
void arrive_with_bytes(uint64_t* barrier, int num_bytes);
void await_phase(uint64_t* barrier, int parity);
// A box of a matrix to shared memory; csrc/kernels/cuda/tensor_copies.cuh says what.
void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, int i, int j);
void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, int i, int j, int k, int l);
void meet_some(int barrier, int threads);
void arrive_some(int barrier, int threads);
// The thread's turn comes again once no other can go on: as late as may be.
void wait_for_others();
// The thread's turn comes again once the condition holds.
void wait_until(const std::function<bool()>& condition);

}  // namespace llmserve::cuda::emulator

#define threadIdx ::llmserve::cuda::emulator::thread_idx
#define blockIdx ::llmserve::cuda::emulator::block_idx
#define blockDim ::llmserve::cuda::emulator::block_dim
#define gridDim ::llmserve::cuda::emulator::grid_dim

inline void __syncthreads() { llmserve::cuda::emulator::sync_threads(); }
inline int __syncthreads_or(int value) { return llmserve::cuda::emulator::sync_threads_or(value); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = llmserve::cuda::emulator::shuffle_xor(bits, mask);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
T __shfl_sync(unsigned, T value, int from) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = llmserve::cuda::emulator::shuffle(bits, from);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void __syncwarp() { llmserve::cuda::emulator::shuffle_xor(0, 0); }
inline int __any_sync(unsigned, int value) {
  uint64_t any = value != 0 ? 1 : 0;
  for (int mask = 16; mask > 0; mask /= 2) any |= llmserve::cuda::emulator::shuffle_xor(any, mask);
  return any != 0 ? 1 : 0;
}
inline uint32_t __ballot_sync(unsigned, bool value) {
  const unsigned lane = llmserve::cuda::emulator::thread_idx.x % 32;
  uint64_t all = value ? uint64_t{1} << lane : 0;
  for (int mask = 16; mask > 0; mask /= 2) all |= llmserve::cuda::emulator::shuffle_xor(all, mask);
  return static_cast<uint32_t>(all);
}
inline int __popc(uint32_t x) { return std::popcount(x); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void store_release(int64_t* to, int64_t value) {
  std::atomic_ref<int64_t>(*to).store(value, std::memory_order_release);
}

// Fibers do not preempt each other.
template <class T>
T atomicAdd(T* to, T value) {
  const T old = *to;
  *to += value;
  return old;
}
template <class T>
T atomicMax(T* to, T value) {
  const T old = *to;
  if (value > old) *to = value;
  return old;
}

template <class T>
T __ldcs(const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T) != 0) std::abort();  // as a GPU would
  return *from;
}

template <class T>
T __ldcg(const T* from) {
  return __ldcs(from);
}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int32_t __float_as_int(float x) { return __builtin_bit_cast(int32_t, x); }
inline float __int_as_float(int32_t x) { return __builtin_bit_cast(float, x); }
inline uint32_t __float_as_uint(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float __uint_as_float(uint32_t x) { return __builtin_bit_cast(float, x); }
inline int __clz(int x) { return std::countl_zero(static_cast<uint32_t>(x)); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}
// Byte i of the result is that of x (0 to 3) or y (4 to 7) which four bits of `selector` name.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
using std::isnan;
