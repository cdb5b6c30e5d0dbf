// Any machine: 16 lanes that the compiler lowers to what the baseline has. The lanes are AVX-512's,
// so that its code paths are exercised everywhere.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kernel_table.h"

namespace llmserve::cpu::generic {
namespace {

constexpr int kLanes = 16;
// SSE2 has 16 registers of 4 lanes, 4 of 16: 2 sums, a weight vector, a broadcast and temporaries.
constexpr int kRegisters = 4;
constexpr int kRowTile = 2;
#include "kernels/cpu/lanes.inc"

// One rounding where the machine has it; a library call otherwise would be far slower than two.
inline Vec v_fma(Vec a, Vec b, Vec c) {
#ifdef __FP_FAST_FMAF
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
inline Vec v_max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec v_min(Vec a, Vec b) { return a < b ? a : b; }
inline bool v_any_greater(Vec a, Vec b) {
  const IVec mask = a > b;
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= mask[i];
  return any != 0;
}
inline void u_mul_wide(UVec a, uint32_t b, UVec* high, UVec* low) {
  for (int i = 0; i < kLanes; ++i) (*high)[i] = (uint32_t)(((uint64_t)a[i] * b) >> 32);
  *low = a * u_splat(b);
}
inline Vec v_load(const uint16_t* p) {
  UVec bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = (uint32_t)p[i] << 16;
  return (Vec)bits;
}
inline float v_sum(Vec x) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}
inline float v_largest(Vec x) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
}
// Nothing is done here: the caller's scalar loop does all.
inline int64_t transpose_rows(const float* const*, int64_t, float*) { return 0; }
inline int64_t transpose_rows(const uint16_t* const*, int64_t, float*) { return 0; }

#include "kernels/cpu/kernels.inc"

}  // namespace

constexpr KernelTable kTable = kKernels;

}  // namespace llmserve::cpu::generic
