#include "kernels/cpu/quantized_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/quantized_packing.h"

namespace llmserve::cpu {

QuantizedRows::QuantizedRows(const KernelTable& kernels, const LinearWeight& like, int64_t m,
                             Buffer& memory)
    : kernels_(kernels),
      k_(like.in_features),
      outlier_threshold_(like.format->outlier_threshold),
      layout_(layout_of(*like.format, k_)),
      stride_(row_stride(layout_)) {
  const int64_t bytes = m * quantized_activation_bytes(*like.format, k_);
  if (memory.num_bytes() < bytes) memory = Buffer(bytes);
  if (layout_.has_float_products) {
    floats_ = memory.data();
    return;
  }
  integers_ = reinterpret_cast<int8_t*>(memory.data());
  groups_ = reinterpret_cast<IntegerGroup*>(integers_ + m * stride_);
  if (outlier_threshold_ == 0) return;
  outlier_counts_ = reinterpret_cast<int32_t*>(groups_ + m * layout_.num_groups);
  outliers_ = reinterpret_cast<Outlier*>(outlier_counts_ + m);
}

int64_t QuantizedRows::product_bytes() const {
  return layout_.bits < 8 || layout_.has_float_products ? kUnpackedBytes : 0;
}

void QuantizedRows::write(int64_t r, const float* x, const LinearWeight& weight,
                          float* scratch) const {
  if (weight.input_order) {
    const int32_t* order = weight.input_order->data();
    for (int64_t i = 0; i < k_; ++i) scratch[i] = x[order[i]];
    x = scratch;
  }
  if (floats_ != nullptr) return write_floats(r, x);
  if (outliers_ != nullptr) {
    if (x != scratch) std::memcpy(scratch, x, static_cast<size_t>(k_) * sizeof(float));
    take_outliers(r, scratch);
    x = scratch;
  }
  kernels_.round_row(x, k_, layout_.group_size, integers(r), groups_ + r * layout_.num_groups);
}

void QuantizedRows::write_floats(int64_t r, const float* x) const {
  if (kernels_.linear_bf16.round_row == nullptr) {
    float* to = reinterpret_cast<float*>(floats_) + r * stride_;
    std::memcpy(to, x, static_cast<size_t>(k_) * sizeof(float));
    std::fill(to + k_, to + stride_, 0.0f);
  } else {
    uint16_t* to = reinterpret_cast<uint16_t*>(floats_) + r * stride_;
    kernels_.linear_bf16.round_row(x, k_, to);
    std::fill(to + k_, to + stride_, uint16_t{0});
  }
}

void QuantizedRows::take_outliers(int64_t r, float* x) const {
  Outlier* to = outliers_ + r * k_;
  int32_t count = 0;
  for (int64_t i = 0; i < k_; ++i) {
    if (!(std::fabs(x[i]) >= outlier_threshold_) || !std::isfinite(x[i])) continue;
    to[count++] = {static_cast<int32_t>(i), x[i]};
    x[i] = 0;
  }
  outlier_counts_[r] = count;
}

QuantizedPart QuantizedRows::part(int64_t begin, int64_t count, const LinearWeight& weight) const {
  QuantizedPart part{};
  part.layout = layout_;
  part.x_stride = stride_;
  part.m = count;
  part.n = weight.out_features;
  part.weight = reinterpret_cast<const uint8_t*>(weight.bytes());
  if (floats_ != nullptr) {
    const bool is_bf16 = kernels_.linear_bf16.round_row != nullptr;
    part.rows = floats_ + begin * stride_ * size_bytes(is_bf16 ? DType::kBF16 : DType::kF32);
    return part;
  }
  part.x = integers(begin);
  part.groups = groups_ + begin * layout_.num_groups;
  if (outliers_ == nullptr) return part;
  part.outliers = outliers_ + begin * k_;
  part.outlier_counts = outlier_counts_ + begin;
  part.outlier_stride = k_;
  return part;
}

}  // namespace llmserve::cpu
