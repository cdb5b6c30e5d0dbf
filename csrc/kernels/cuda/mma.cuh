// What a warp does as one on sm_80 and later: products of small bf16 matrices, the loads that bring
// their fragments from shared memory, and copies to shared memory that go on while others compute.
// Every lane must call each of them. tests/cuda/emulator has a stand-in for each.
//
// A fragment is a lane's share of a matrix. With g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix
// Fragments for mma.m16n8k16 with floating point type"):
//   A [16, 16], 4 registers of two bf16, the lower half first: rows g, g + 8, g, g + 8, columns
//     2t, 2t + 1 of the first eight (registers 0, 1), 2t + 8, 2t + 9 (registers 2, 3)
//   B [16, 8], 2 registers: column g, rows 2t, 2t + 1 (register 0), 2t + 8, 2t + 9 (register 1)
//   C [16, 8], 4 floats: row g, columns 2t, 2t + 1; row g + 8, the same columns
// Of m16n8k32 and m16n8k16 over signed bytes, four a register, the lowest first (C as above):
//   A [16, 32], 4 registers: rows g, g + 8, g, g + 8, columns 4t ... 4t + 3 (registers 0, 1), 16
//     more (2, 3); of [16, 16] the first two
//   B [32, 8], 2 registers: column g, rows 4t ... 4t + 3, and 16 more; of [16, 8] the first
#pragma once

#include "kernels/cuda/device_math.cuh"

namespace llmserve::cuda {

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t shared_address(const void* data) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(data));
}

// Four 8 x 8 matrices of bf16. Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, so
// aligned) and gets, in register i, the elements 2t and 2t + 1 of row g of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const uint16_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same of the transposed matrices: the rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], const uint16_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// c += a b.
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of signed bytes, exact; k = 32, and k = 16.
__device__ __forceinline__ void multiply_integers(int32_t (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_integers(int32_t (&c)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// 16 bytes, aligned on both sides, from global to shared memory; zeros if not `is_there`, and then
// `from` is not read. Done after wait_for_copies(), seen by others after a barrier.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// Closes the thread's copies since the last call, perhaps none, as one group.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until all but the thread's last kGroups groups are done.
template <int kGroups>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kGroups) : "memory");
}

// 2^x within 2 ulp; 0 for -inf. Denormal results are 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two bf16, the lower half first, rounded to nearest even.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// Pairs of bf16, multiplied.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}
#else
using emulator::commit_copies;
using emulator::copy_async;
using emulator::load_matrices;
using emulator::load_transposed;
using emulator::multiply_add;
using emulator::multiply_integers;
inline void wait_for_copies() { emulator::wait_for_copies(); }
template <int kGroups>
void wait_for_all_but() {
  emulator::wait_for_copies(kGroups);
}
inline float fast_exp2(float x) { return std::exp2(x); }
inline uint32_t pack_bf16(float low, float high) {
  return static_cast<uint32_t>(float_to_bf16(high)) << 16 | float_to_bf16(low);
}
inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  const auto half = [](uint32_t x, int shift) {
    return bf16_to_float(static_cast<uint16_t>(x >> shift));
  };
  return pack_bf16(half(a, 0) * half(b, 0), half(a, 16) * half(b, 16));
}
#endif

// Two e4m3 codes, in bits 8 to 15 and 24 to 31, as bf16 times those of `scale`: powers of two, so
// that no bit is lost of what is 2^-130 or more. Codes of NaN are not among a cache's.
__device__ __forceinline__ uint32_t widen_codes(uint32_t codes, uint32_t scale) {
  const uint32_t magnitude = (codes & 0x7f007f00u) >> 4;
  // The exponent's bias is made up for by 2^120, subnormals included.
  return multiply_pairs(multiply_pairs(magnitude | (codes & 0x80008000u), 0x7b807b80u), scale);
}

}  // namespace llmserve::cuda
