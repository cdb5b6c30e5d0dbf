// Rows of activations as products with a quantized weight take them.
#pragma once

#include <cstdint>

#include "kernels/cpu/cpu_workers.h"

namespace llmserve::cpu {

// Each in working memory of its own, written by one thread, in any order.
class QuantizedRows {
 public:
  // Of `m` rows beside weights like this one. `memory` grows where it has to and stays.
  QuantizedRows(const KernelTable& kernels, const LinearWeight& like, int64_t m, Buffer& memory);

  // Floats of scratch that write() takes.
  static int64_t scratch_floats(int64_t k) { return k; }
  // Row r is x [K], brought into the order of `weight`'s columns first. x is not in `scratch`.
  void write(int64_t r, const float* x, const LinearWeight& weight, float* scratch) const;

  // Bytes of scratch that a product takes.
  int64_t product_bytes() const;
  // The product of `count` rows from `begin` on with a weight, but for what it writes, and which
  // panels.
  QuantizedPart part(int64_t begin, int64_t count, const LinearWeight& weight) const;
  // What runs such a part.
  void (*kernel() const)(const QuantizedPart*) {
    return layout_.has_float_products ? kernels_.coded_linear : kernels_.quantized_linear;
  }
  const QuantizedLayout& layout() const { return layout_; }

 private:
  int8_t* integers(int64_t r) const { return integers_ + r * stride_; }
  void write_floats(int64_t r, const float* x) const;
  // Notes the outliers of x and leaves zeros in their places.
  void take_outliers(int64_t r, float* x) const;

  const KernelTable& kernels_;
  const int64_t k_;
  const float outlier_threshold_;
  const QuantizedLayout layout_;
  const int64_t stride_;
  int8_t* integers_ = nullptr;  // [m, stride]
  IntegerGroup* groups_ = nullptr;
  std::byte* floats_ = nullptr;  // in place of both: [m, stride] f32 or bf16
  int32_t* outlier_counts_ = nullptr;
  Outlier* outliers_ = nullptr;  // [m, k]
};

}  // namespace llmserve::cpu
