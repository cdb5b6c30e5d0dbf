// Numbers that a request brings along or takes away: f32 in host memory, whatever the device.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "core/error.h"

namespace llmserve {

struct HostArray {
  int64_t num_rows = 0;
  int64_t width = 0;
  std::unique_ptr<float[]> values;  // [num_rows, width], row-major

  HostArray() = default;
  // Not initialised, and its pages not touched. Throws ResourceExhausted.
  HostArray(int64_t rows, int64_t columns) : num_rows(rows), width(columns) {
    values.reset(new (std::nothrow) float[static_cast<size_t>(rows * columns)]);
    if (!values)
      throw ResourceExhausted(
          concat("no memory for an array of ", rows, " x ", columns, " float32"));
  }

  float* row(int64_t idx) const { return values.get() + idx * width; }
  int64_t num_bytes() const { return num_rows * width * static_cast<int64_t>(sizeof(float)); }
};

}  // namespace llmserve
