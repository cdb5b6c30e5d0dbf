// How long steps take by their number of rows, as measured: what a verifying step costs more than a
// plain one. A step that reads all weights for few rows takes hardly longer with a few more.
#pragma once

#include <array>
#include <cstdint>

namespace llmserve {

class StepTimes {
 public:
  // A step without prompts took so long; num_rows >= 1.
  void add(int64_t num_rows, double elapsed_us);
  // What a step of so many rows would take: measured, between what was measured, or from the
  // nearest and the slope of a prior. 0 before anything was measured.
  double estimate_us(int64_t num_rows) const;
  // Of the smallest and the largest steps that were measured; 0: none was.
  int64_t least_rows() const;
  int64_t most_rows() const;

 private:
  // Each number of rows up to kNumExact, then four for each doubling.
  static constexpr int kNumExact = 16;
  static constexpr int kNumBuckets = kNumExact + 4 * 10;
  struct Bucket {
    double rows = 0;  // of the steps in it
    double elapsed_us = 0;
    int32_t count = 0;
    int64_t last_step = 0;  // by num_steps_
  };
  static int bucket_of(int64_t num_rows);
  void forget_seldom();

  std::array<Bucket, kNumBuckets> buckets_{};
  int64_t num_steps_ = 0;
};

}  // namespace llmserve
