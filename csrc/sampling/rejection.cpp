#include "sampling/rejection.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/ref/row_draw.h"
#include "kernels/ref/scalar_math.h"

namespace llmserve {
namespace {

// In (0, 1), of 53 bits.
double uniform(uint64_t seed, int64_t position, DrawStream stream) {
  uint32_t bits[4] = {0, static_cast<uint32_t>(position),
                      static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32),
                      static_cast<uint32_t>(stream)};
  ref::u_philox(bits, seed);
  const uint64_t word = uint64_t{bits[0]} << 32 | bits[1];
  return (static_cast<double>(word >> 11) + 0.5) * 0x1p-53;
}

// The token whose share of the weights holds the point; weight(i) >= 0. -1 where all are 0.
template <class Weight>
int32_t pick(size_t count, double point, Weight weight) {
  double total = 0;
  for (size_t i = 0; i < count; ++i) total += weight(i);
  const double target = point * total;
  double sum = 0;
  int32_t last = -1;
  for (size_t i = 0; i < count; ++i) {
    const double share = weight(i);
    if (!(share > 0)) continue;
    last = static_cast<int32_t>(i);
    sum += share;
    if (sum > target) break;
  }
  return last;
}

}  // namespace

bool fill_probabilities(std::span<const float> logits, const SampleRow& row,
                        std::vector<float>& probabilities) {
  if (!ref::kept_logits(logits, row, probabilities)) return false;
  double sum = 0;
  for (float& value : probabilities) {
    value = std::isinf(value) ? 0 : ref::v_exp(value);
    sum += static_cast<double>(value);
  }
  for (float& value : probabilities) value = static_cast<float>(static_cast<double>(value) / sum);
  return true;
}

int32_t draw_from(std::span<const float> probabilities, uint64_t seed, int64_t position,
                  DrawStream stream) {
  return pick(probabilities.size(), uniform(seed, position, stream),
              [&](size_t i) { return static_cast<double>(probabilities[i]); });
}

int32_t draw_after_guess(std::span<const float> target, int32_t guess,
                         std::span<const float> guess_probabilities, uint64_t seed,
                         int64_t position) {
  const auto place = static_cast<size_t>(guess);
  const bool is_certain = guess_probabilities.empty();
  const double q = is_certain ? 1 : static_cast<double>(guess_probabilities[place]);
  if (uniform(seed, position, DrawStream::kAccept) * q < static_cast<double>(target[place]))
    return guess;
  const int32_t token_id =
      pick(target.size(), uniform(seed, position, DrawStream::kResidual), [&](size_t i) {
        const double other = is_certain ? (i == place ? 1 : 0) : guess_probabilities[i];
        return std::max(0.0, static_cast<double>(target[i]) - other);
      });
  // Nothing is left of p where it is q but for roundings.
  return token_id >= 0 ? token_id : guess;
}

}  // namespace llmserve
