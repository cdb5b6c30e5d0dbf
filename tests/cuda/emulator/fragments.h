// Which element of its matrix element i of a lane's fragment is, for mma.m16n8k16 over bf16 and for
// mma.m16n8k32 over bytes (m16n8k16: its first half): the formulas of the PTX ISA, figures "MMA
// .m16n8k16 fragment layout" and "MMA .m16n8k32 fragment layout".
#pragma once

namespace llmserve::cuda::emulator {

constexpr int row_of_a(int lane, int i) {
  const int group = lane >> 2;
  return (i >= 0 && i < 2) || (i >= 4 && i < 6) ? group : group + 8;
}
constexpr int column_of_a(int lane, int i) {
  const int thread = lane % 4;
  return i < 4 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8;
}
constexpr int row_of_b(int lane, int i) {
  const int thread = lane % 4;
  return i < 2 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8;
}
constexpr int column_of_b(int lane) { return lane >> 2; }
constexpr int row_of_c(int lane, int i) { return i < 2 ? lane >> 2 : (lane >> 2) + 8; }
constexpr int column_of_c(int lane, int i) { return lane % 4 * 2 + (i & 1); }

constexpr int byte_row_of_a(int lane, int i) {
  const int group = lane >> 2;
  return (i >= 0 && i < 4) || (i >= 8 && i < 12) ? group : group + 8;
}
constexpr int byte_column_of_a(int lane, int i) {
  const int thread = lane % 4;
  return i < 8 ? thread * 4 + (i & 3) : thread * 4 + (i & 3) + 16;
}
constexpr int byte_row_of_b(int lane, int i) {
  const int thread = lane % 4;
  return i < 4 ? thread * 4 + (i & 3) : thread * 4 + (i & 3) + 16;
}

// From the figures: the corners and a middle of each matrix.
static_assert(row_of_a(0, 0) == 0 && column_of_a(0, 0) == 0);
static_assert(row_of_a(0, 2) == 8 && column_of_a(0, 2) == 0);
static_assert(row_of_a(3, 5) == 0 && column_of_a(3, 5) == 15);
static_assert(row_of_a(28, 2) == 15 && column_of_a(28, 2) == 0);
static_assert(row_of_a(31, 7) == 15 && column_of_a(31, 7) == 15);
static_assert(row_of_a(5, 4) == 1 && column_of_a(5, 4) == 10);
static_assert(row_of_b(0, 0) == 0 && column_of_b(0) == 0);
static_assert(row_of_b(0, 2) == 8 && row_of_b(3, 3) == 15 && column_of_b(31) == 7);
static_assert(row_of_b(29, 1) == 3 && column_of_b(29) == 7);
static_assert(row_of_c(0, 1) == 0 && column_of_c(0, 1) == 1);
static_assert(row_of_c(0, 2) == 8 && column_of_c(3, 3) == 7);
static_assert(row_of_c(31, 3) == 15 && row_of_c(28, 0) == 7 && column_of_c(28, 0) == 0);

static_assert(byte_row_of_a(0, 0) == 0 && byte_column_of_a(3, 3) == 15);
static_assert(byte_row_of_a(0, 4) == 8 && byte_column_of_a(0, 4) == 0);
static_assert(byte_row_of_a(28, 8) == 7 && byte_column_of_a(28, 8) == 16);
static_assert(byte_row_of_a(31, 15) == 15 && byte_column_of_a(31, 15) == 31);
static_assert(byte_row_of_b(0, 0) == 0 && byte_row_of_b(3, 3) == 15);
static_assert(byte_row_of_b(0, 4) == 16 && byte_row_of_b(31, 7) == 31);

}  // namespace llmserve::cuda::emulator
