#include "speculation/step_times.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace llmserve {
namespace {

// Of a step's time, what a row more costs where nothing is known: a bf16 model of 1.1 billion
// weights on two cores takes 67 ms for its weights and 5 ms a row.
constexpr double kRowShare = 0.08;
// Steps over which a time is averaged: contexts grow, and neighbours come and go.
constexpr double kWeight = 0.15;
// A step that took so much longer than its kind was held up: it counts as this much.
constexpr double kLongest = 3;
// A number of rows that ran fewer times, and none of them lately, is as good as not measured: a
// step of it that was held up would keep it from being chosen, and so from being measured again.
constexpr int32_t kFew = 8;
constexpr int64_t kLately = 64;

}  // namespace

int StepTimes::bucket_of(int64_t num_rows) {
  if (num_rows <= kNumExact) return static_cast<int>(num_rows) - 1;
  const auto rows = static_cast<uint64_t>(num_rows);
  const int log = std::bit_width(rows) - 1;  // >= 4
  const int quarter = static_cast<int>(rows >> (log - 2)) & 3;
  return std::min(kNumExact + 4 * (log - 4) + quarter, kNumBuckets - 1);
}

// But the fewest rows: those of plain steps, which all others are compared with.
void StepTimes::forget_seldom() {
  bool is_plain = true;
  for (Bucket& bucket : buckets_) {
    if (bucket.count == 0 || std::exchange(is_plain, false)) continue;
    if (bucket.count < kFew && bucket.last_step < num_steps_ - kLately) bucket.count = 0;
  }
}

void StepTimes::add(int64_t num_rows, double elapsed_us) {
  if (++num_steps_ % kLately == 0) forget_seldom();
  Bucket& bucket = buckets_[static_cast<size_t>(bucket_of(num_rows))];
  if (bucket.count > 4) elapsed_us = std::min(elapsed_us, kLongest * bucket.elapsed_us);
  const double weight = std::max(kWeight, 1.0 / (bucket.count + 1));
  bucket.rows += weight * (static_cast<double>(num_rows) - bucket.rows);
  bucket.elapsed_us += weight * (elapsed_us - bucket.elapsed_us);
  ++bucket.count;
  bucket.last_step = num_steps_;
}

double StepTimes::estimate_us(int64_t num_rows) const {
  const int place = bucket_of(num_rows);
  const Bucket* below = nullptr;
  const Bucket* above = nullptr;
  for (int i = place; i >= 0 && below == nullptr; --i)
    if (buckets_[static_cast<size_t>(i)].count > 0) below = &buckets_[static_cast<size_t>(i)];
  for (int i = place; i < kNumBuckets && above == nullptr; ++i)
    if (buckets_[static_cast<size_t>(i)].count > 0) above = &buckets_[static_cast<size_t>(i)];
  if (below == nullptr && above == nullptr) return 0;
  const auto rows = static_cast<double>(num_rows);
  if (below == nullptr || above == nullptr || below == above) {
    const Bucket& only = below != nullptr ? *below : *above;
    return only.elapsed_us * (1 + kRowShare * (rows - 1)) / (1 + kRowShare * (only.rows - 1));
  }
  const double span = std::max(above->rows - below->rows, 1e-9);
  const double share = std::clamp((rows - below->rows) / span, 0.0, 1.0);
  return below->elapsed_us + share * (above->elapsed_us - below->elapsed_us);
}

int64_t StepTimes::least_rows() const {
  const auto found = std::ranges::find_if(buckets_, [](const Bucket& b) { return b.count > 0; });
  return found == buckets_.end() ? 0 : std::lround(found->rows);
}

int64_t StepTimes::most_rows() const {
  int64_t most = 0;
  for (const Bucket& bucket : buckets_)
    if (bucket.count > 0) most = std::lround(bucket.rows);
  return most;
}

}  // namespace llmserve
