#include "comm/host_reduction.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/float_types.h"

namespace llmserve {
namespace {

using Data = std::span<const void* const>;

// The elements of one dtype as what they are added in, and back.
struct F32 {
  using Element = float;
  using Sum = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};
struct BF16 {
  using Element = uint16_t;
  using Sum = float;
  static float load(uint16_t bits) { return bf16_to_f32(bits); }
  static uint16_t store(float value) { return f32_to_bf16(value); }
};
struct F16 {
  using Element = uint16_t;
  using Sum = float;
  static float load(uint16_t bits) { return f16_to_f32(bits); }
  static uint16_t store(float value) { return f32_to_f16(value); }
};

struct I32 {
  using Element = int32_t;
  using Sum = int64_t;
  static int64_t load(int32_t value) { return value; }
  static int32_t store(int64_t value) { return static_cast<int32_t>(value); }
};

float larger(float a, float b) { return a > b || std::isnan(a) ? a : b; }
int64_t larger(int64_t a, int64_t b) { return std::max(a, b); }

template <class Format>
void reduce_block(Data data, Reduction reduction, int64_t begin, int64_t count,
                  typename Format::Sum* sums) {
  using Element = typename Format::Element;
  for (size_t rank = 0; rank < data.size(); ++rank) {
    const auto* x = static_cast<const Element*>(data[rank]) + begin;
    for (int64_t i = 0; i < count; ++i) {
      const auto value = Format::load(x[i]);
      if (rank == 0)
        sums[i] = value;
      else
        sums[i] = reduction == Reduction::kSum ? sums[i] + value : larger(sums[i], value);
    }
  }
}

template <class Format, class Put>
void reduce(Data data, Reduction reduction, int64_t begin, int64_t count, const Put& put) {
  std::array<typename Format::Sum, kReducedAtOnce> sums;
  std::array<typename Format::Element, kReducedAtOnce> results;
  for (int64_t done = 0; done < count; done += kReducedAtOnce) {
    const int64_t length = std::min(kReducedAtOnce, count - done);
    reduce_block<Format>(data, reduction, begin + done, length, sums.data());
    for (int64_t i = 0; i < length; ++i)
      results[static_cast<size_t>(i)] = Format::store(sums[static_cast<size_t>(i)]);
    put(results.data(), done, length);
  }
}

}  // namespace

void reduce_in_order(
    Data data, DType dtype, Reduction reduction, int64_t begin, int64_t count,
    const std::function<void(const void* results, int64_t done, int64_t count)>& put) {
  if (dtype == DType::kF32) return reduce<F32>(data, reduction, begin, count, put);
  if (dtype == DType::kBF16) return reduce<BF16>(data, reduction, begin, count, put);
  if (dtype == DType::kI32) return reduce<I32>(data, reduction, begin, count, put);
  reduce<F16>(data, reduction, begin, count, put);
}

}  // namespace llmserve
