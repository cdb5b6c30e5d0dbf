// What small products and prompts are made of that say at load whether a GPU's results are right.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "core/float_types.h"
#include "kernels/cuda/cuda_memory.h"

namespace llmserve::cuda {

// In [-1, 1), the same everywhere: numbers by Knuth's MMIX constants.
class TrialNumbers {
 public:
  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(state_ >> 40) * 0x1p-23f - 1.0f;
  }
  std::vector<float> floats(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    std::ranges::generate(values, [this] { return next(); });
    return values;
  }
  std::vector<uint16_t> bf16(int64_t count) {
    std::vector<uint16_t> values(static_cast<size_t>(count));
    std::ranges::generate(values, [this] { return f32_to_bf16(next()); });
    return values;
  }

 private:
  uint64_t state_ = 1;
};

template <class T>
Buffer upload(const std::vector<T>& values, DeviceMemory& memory) {
  const auto num_bytes = static_cast<int64_t>(values.size() * sizeof(T));
  Buffer buffer(num_bytes, memory);
  memory.copy_from_host(buffer.data(), values.data(), num_bytes);
  return buffer;
}

}  // namespace llmserve::cuda
