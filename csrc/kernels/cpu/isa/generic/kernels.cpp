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
inline int32_t v_sum(IVec x) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}
inline int32_t v_largest(IVec x) {
  int32_t most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
}
// Nothing is done here: the caller's scalar loop does all.
inline int64_t transpose_rows(const float* const*, int64_t, float*) { return 0; }
inline int64_t transpose_rows(const uint16_t* const*, int64_t, float*) { return 0; }

constexpr int kQuantizedRows = 2;
constexpr int64_t kWidenedTiles = 4;
constexpr int quantized_vecs(int, bool, bool) { return 1; }
inline Vec v_load_f16(const uint8_t* p) {
  typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
  Halves halves;
  memcpy(&halves, p, sizeof(halves));
  const UVec bits = __builtin_convertvector(halves, UVec);
  // The exponent's bias is made up for by an exact product, subnormals included; scales are finite.
  const Vec magnitude = (Vec)((bits & 0x7fffu) << 13) * 0x1p112f;
  return (Vec)((UVec)magnitude | (bits & 0x8000u) << 16);
}
inline Vec v_load_i8(const uint8_t* p) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, Vec);
}
inline Vec v_load_exponents(const uint8_t* p) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return (Vec)(__builtin_convertvector(bytes, UVec) << 23);
}
struct Quads {
  int8_t bytes[4 * kLanes];
};
inline Quads q_load(const uint8_t* p) {
  Quads x;
  memcpy(&x, p, sizeof(x));
  return x;
}
inline Quads q_splat(const int8_t* p) {
  Quads x;
  for (int i = 0; i < 4 * kLanes; ++i) x.bytes[i] = p[i % 4];
  return x;
}
inline Quads q_masked(Quads x, int mask) {
  for (int i = 0; i < 4 * kLanes; ++i) x.bytes[i] = (int8_t)(x.bytes[i] & mask);
  return x;
}
inline Quads q_low(Quads x) { return q_masked(x, 15); }
inline Quads q_high(Quads x) {
  for (int i = 0; i < 4 * kLanes; ++i) x.bytes[i] = (int8_t)((uint8_t)x.bytes[i] >> 4);
  return x;
}
template <int n>
inline Quads q_moved(Quads x) {
  for (int i = 0; i < 4 * kLanes; ++i)
    x.bytes[i] = (int8_t)(n < 0 ? (uint8_t)x.bytes[i] >> -n : (uint8_t)x.bytes[i] << n);
  return x;
}
inline Quads q_with(Quads low, Quads bits, int mask) {
  for (int i = 0; i < 4 * kLanes; ++i)
    low.bytes[i] = (int8_t)(low.bytes[i] | (bits.bytes[i] & mask));
  return low;
}
inline Quads q_load_nibbles(const uint8_t* p) {
  Quads x;
  for (int i = 0; i < 4 * kLanes; ++i) x.bytes[i] = (int8_t)(p[i / 2] >> i % 2 * 4);
  return x;
}
inline Quads q_table(const int8_t* table) {
  Quads x;
  for (int i = 0; i < 4 * kLanes; ++i) x.bytes[i] = table[i % 16];
  return x;
}
inline Quads q_look_up(const Quads& table, Quads x) {
  for (int i = 0; i < 4 * kLanes; ++i) x.bytes[i] = table.bytes[x.bytes[i]];
  return x;
}
inline void store_pairs(const Quads& low, const Quads& high, uint16_t* to) {
  for (int i = 0; i < 4 * kLanes; ++i)
    to[i / 16 * 8 + i % 16 / 8 * 32 + i % 8] =
        (uint16_t)((uint8_t)low.bytes[i] | (uint8_t)high.bytes[i] << 8);
}
typedef Quads SignedQuads;
constexpr int32_t kSignedOffset = 0;
inline SignedQuads q_signed(Quads x) { return x; }
inline IVec dot_signed(IVec sum, const Quads& w, const Quads& x) {
  for (int i = 0; i < kLanes; ++i) {
    int32_t dot = 0;
    for (int j = 0; j < 4; ++j) dot += (int32_t)w.bytes[4 * i + j] * x.bytes[4 * i + j];
    sum[i] += dot;
  }
  return sum;
}
inline IVec dot_unsigned(IVec sum, const Quads& w, const Quads& x) { return dot_signed(sum, w, x); }
typedef IVec NibbleSums;
constexpr int64_t kFoldDepth = 0;  // the sums have 32 bits
inline NibbleSums unfolded(IVec sum) { return sum; }
inline NibbleSums dot_nibbles(NibbleSums sums, const Quads& w, const Quads& x) {
  return dot_signed(sums, w, x);
}
inline IVec folded(NibbleSums sums) { return sums; }

// Of the code in this byte of each lane: its number's bf16 in the upper half, and zeros. The
// exponent's bias is made up for by an exact product, subnormals included.
template <int byte>
inline IVec widened_code(IVec x) {
  const IVec bits = ((x << (24 - 8 * byte)) >> 4) & (int32_t)0x87f00000;
  return v_bits(v_from_bits(bits) * v_splat(0x1p120f));
}

inline void widen_quads(const uint8_t* quads, uint16_t* to) {
  IVec x;
  memcpy(&x, quads, sizeof(x));
  const UVec first = ((UVec)widened_code<0>(x) >> 16) | (UVec)widened_code<1>(x);
  const UVec second = ((UVec)widened_code<2>(x) >> 16) | (UVec)widened_code<3>(x);
  memcpy(to, &first, sizeof(first));
  memcpy(to + 32, &second, sizeof(second));
}

inline void widen_pairs(const uint8_t* pairs, uint16_t* to) {
  uint8_t quads[64];
  for (int i = 0; i < 64; ++i)
    quads[i / 16 * 16 + i % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2] = pairs[i];
  widen_quads(quads, to);
}

inline void widen_line(const uint8_t* line, uint16_t* to) {
  for (int64_t i = 0; i < 64; i += kLanes) {
    IVec codes;
    for (int j = 0; j < kLanes; ++j) codes[j] = line[i + j];
    const UVec bits = (UVec)widened_code<0>(codes) >> 16;
    for (int j = 0; j < kLanes; ++j) to[i + j] = (uint16_t)bits[j];
  }
}

#include "kernels/cpu/kernels.inc"

}  // namespace

constexpr KernelTable kTable = kKernels;

}  // namespace llmserve::cpu::generic
