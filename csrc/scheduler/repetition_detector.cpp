#include "scheduler/repetition_detector.h"

#include <algorithm>

namespace llmserve {

RepetitionDetector::RepetitionDetector(const RepetitionDetection& params)
    : min_size_(std::max(1, params.min_pattern_size)),
      min_count_(params.min_count),
      num_equal_(static_cast<size_t>(params.max_pattern_size - min_size_ + 1), 0) {}

bool RepetitionDetector::append(std::span<const int32_t> output) {
  bool is_repeating = false;
  const int64_t num_tokens = std::ssize(output);
  for (size_t i = 0; i < num_equal_.size(); ++i) {
    const int64_t size = min_size_ + static_cast<int64_t>(i);
    if (size >= num_tokens) break;
    const bool is_equal = output.back() == output[static_cast<size_t>(num_tokens - 1 - size)];
    num_equal_[i] = is_equal ? num_equal_[i] + 1 : 0;
    is_repeating = is_repeating || num_equal_[i] >= (min_count_ - 1) * size;
  }
  return is_repeating;
}

}  // namespace llmserve
