#include "speculation/acceptance.h"

#include <algorithm>
#include <cmath>

namespace llmserve {
namespace {

// A rate is that of about the last 1 / kWeight tries.
constexpr double kWeight = 0.1;
// What the prior counts for, in tries.
constexpr double kPriorTries = 4;
// Of a model that is trained on the same text; a hopeless one is found out in five tries.
constexpr double kDefaultRate = 0.7;
// Tries that are so many steps old count half: text changes.
constexpr double kHalfLife = 128;

}  // namespace

void Acceptance::add(int32_t num_drafted, int32_t num_accepted, bool is_cut, int64_t step) {
  ++num_tries_;
  last_step_ = step;
  const int32_t num_seen = std::min(num_drafted, is_cut ? num_accepted : num_accepted + 1);
  for (int32_t i = 0; i < num_seen; ++i) {
    Place& place = places_[static_cast<size_t>(i)];
    const double weight = std::max(kWeight, 1 / (place.weight + 1));
    place.rate += weight * ((i < num_accepted ? 1.0 : 0.0) - place.rate);
    place.weight = std::min(place.weight + 1, 1 / kWeight);
  }
}

double Acceptance::rate(int32_t place, const Acceptance* prior, int64_t step) const {
  const Place& own = places_[static_cast<size_t>(place)];
  const double age = static_cast<double>(step - last_step_);
  const double weight = prior == nullptr ? own.weight : own.weight * std::exp2(-age / kHalfLife);
  if (prior == nullptr) {  // the default is forgotten by and by
    const double other = kPriorTries * std::max(0.0, 1 - weight * kWeight);
    return (own.rate * weight + kDefaultRate * other) / (weight + other);
  }
  const double other = prior->rate(place, nullptr, step);
  return (own.rate * weight + other * kPriorTries) / (weight + kPriorTries);
}

void Acceptance::fill_survival(const Acceptance* prior, int64_t step,
                               std::span<double> survival) const {
  double product = 1;
  for (size_t i = 0; i < survival.size(); ++i) {
    product *= rate(static_cast<int32_t>(i), prior, step);
    survival[i] = product;
  }
}

}  // namespace llmserve
