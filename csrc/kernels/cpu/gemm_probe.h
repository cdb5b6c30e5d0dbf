// How fast this machine's linear layers are, measured: a bound that benchmarks stand next to.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/backend.h"

namespace llmserve {

// The product x[rows, inputs] W[outputs, inputs]ᵀ of linear().
struct GemmShape {
  int64_t rows = 0;
  int64_t outputs = 0;
  int64_t inputs = 0;
};

class GemmProbe {
 public:
  // `isa` is as for select_cpu_isa. Throws InvalidArgument for a shape with nothing to multiply.
  GemmProbe(std::string_view isa, int num_threads, const GemmShape& shape);

  // Operations a second, two a multiply-add, with the weight packed as "float32", "bfloat16" or a
  // format of linear_format_registry(). Measured once, after a run that wakes the threads.
  double ops_per_s(std::string_view arithmetic);

 private:
  struct Packed {
    std::string_view arithmetic;
    LinearWeight weight;
  };
  const LinearWeight& packed(std::string_view arithmetic);

  const GemmShape shape_;
  const std::unique_ptr<Backend> backend_;
  std::vector<float> x_;       // [rows, inputs]
  std::vector<float> weight_;  // [outputs, inputs]
  std::vector<float> out_;     // [rows, outputs]
  std::vector<Packed> packed_;
};

}  // namespace llmserve
