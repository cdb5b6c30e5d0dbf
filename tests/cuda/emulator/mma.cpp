// mma.sync and ldmatrix by the tables of the PTX ISA. fragments.h has those of the product.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "act_together.h"
#include "device.h"
#include "fragments.h"

namespace llmserve::cuda::emulator {
namespace {

constexpr int kLanes = 32;

float to_float(uint16_t bf16) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bf16) << 16);
}

// Element i of a lane's registers of two bf16, the lower half first.
float element(const uint32_t* registers, int i) {
  return to_float(static_cast<uint16_t>(registers[i / 2] >> (i % 2 * 16)));
}

struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

// The order in which a GPU adds the terms is not documented: here it is that of k, the old c first.
void multiply(void* const* lanes) {
  float a[16][16];
  float b[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& mine = *static_cast<const Product*>(lanes[lane]);
    for (int i = 0; i < 8; ++i) a[row_of_a(lane, i)][column_of_a(lane, i)] = element(mine.a, i);
    for (int i = 0; i < 4; ++i) b[row_of_b(lane, i)][column_of_b(lane)] = element(mine.b, i);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    float* c = static_cast<const Product*>(lanes[lane])->c;
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 16; ++k) c[i] += a[row_of_c(lane, i)][k] * b[k][column_of_c(lane, i)];
    }
  }
}

struct IntegerProduct {
  int32_t* c;
  uint32_t a[4];
  uint32_t b[2];
};

int8_t byte_of(const uint32_t* registers, int i) {
  return static_cast<int8_t>(registers[i / 4] >> (i % 4 * 8));
}

// k = 16 is the first half of the registers.
template <int kDepth>
void multiply_bytes(void* const* lanes) {
  int a[16][kDepth];
  int b[kDepth][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& mine = *static_cast<const IntegerProduct*>(lanes[lane]);
    for (int i = 0; i < kDepth / 2; ++i)
      a[byte_row_of_a(lane, i)][byte_column_of_a(lane, i)] = byte_of(mine.a, i);
    for (int i = 0; i < kDepth / 4; ++i)
      b[byte_row_of_b(lane, i)][column_of_b(lane)] = byte_of(mine.b, i);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    int32_t* c = static_cast<const IntegerProduct*>(lanes[lane])->c;
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < kDepth; ++k) c[i] += a[row_of_c(lane, i)][k] * b[k][column_of_c(lane, i)];
    }
  }
}

struct Load {
  uint32_t* to;
  const uint16_t* row;
};

template <bool kIsTransposed>
void load(void* const* lanes) {
  const auto of = [&](int lane) { return *static_cast<const Load*>(lanes[lane]); };
  for (int lane = 0; lane < kLanes; ++lane) {
    if (reinterpret_cast<uintptr_t>(of(lane).row) % 16 != 0) std::abort();  // as a GPU would
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint32_t halves[2];
      for (int i = 0; i < 2; ++i) {
        const int row = kIsTransposed ? lane % 4 * 2 + i : lane / 4;
        const int column = kIsTransposed ? lane / 4 : lane % 4 * 2 + i;
        halves[i] = of(matrix * 8 + row).row[column];
      }
      of(lane).to[matrix] = halves[0] | halves[1] << 16;
    }
  }
}

}  // namespace

void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product mine{c, a, {b0, b1}};
  act_together(&mine, &multiply);
}

void multiply_integers(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  IntegerProduct mine{c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  act_together(&mine, &multiply_bytes<32>);
}

void multiply_integers(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  IntegerProduct mine{c, {a0, a1, 0, 0}, {b, 0}};
  act_together(&mine, &multiply_bytes<16>);
}

void load_matrices(uint32_t (&to)[4], const uint16_t* row) {
  Load mine{to, row};
  act_together(&mine, &load<false>);
}

void load_transposed(uint32_t (&to)[4], const uint16_t* row) {
  Load mine{to, row};
  act_together(&mine, &load<true>);
}

}  // namespace llmserve::cuda::emulator
