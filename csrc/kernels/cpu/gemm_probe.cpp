#include "kernels/cpu/gemm_probe.h"

#include <algorithm>

#include "core/clock.h"
#include "core/error.h"
#include "core/mix.h"
#include "quant/linear_format.h"

namespace llmserve {
namespace {

std::vector<float> uniform_values(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(mix64(i) >> 40) * 0x1p-23f - 1.0f;
  return values;
}

const GemmShape& checked(const GemmShape& shape) {
  if (std::min({shape.rows, shape.outputs, shape.inputs}) < 1)
    throw InvalidArgument(concat("a product has rows, outputs and inputs, got ", shape.rows, ", ",
                                 shape.outputs, " and ", shape.inputs));
  return shape;
}

}  // namespace

GemmProbe::GemmProbe(std::string_view isa, int num_threads, const GemmShape& shape)
    : shape_(checked(shape)),
      backend_(make_backend("cpu", {.num_threads = num_threads, .isa = std::string(isa)})),
      x_(uniform_values(shape.rows * shape.inputs)),
      weight_(uniform_values(shape.outputs * shape.inputs)),
      out_(static_cast<size_t>(shape.rows * shape.outputs)) {}

const LinearWeight& GemmProbe::packed(std::string_view arithmetic) {
  for (const Packed& packed : packed_)
    if (packed.arithmetic == arithmetic) return packed.weight;
  const auto [rows, n, k] = shape_;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    if (name(dtype) != arithmetic) continue;
    const ConstTensor parts[] = {{weight_.data(), DType::kF32, {n, k}}};
    return packed_.emplace_back(name(dtype), backend_->pack_linear(parts, dtype)).weight;
  }
  const LinearFormat& format = find_linear_format(arithmetic);
  check_fits(format, "GemmProbe", k);
  LinearWeight weight =
      backend_->pack_quantized(format, n, k, [&, k = k](int64_t i, const QuantizedRow& row) {
        quantize_row(format, weight_.data() + i * k, k, row);
      });
  return packed_.emplace_back(format.name, std::move(weight)).weight;
}

double GemmProbe::ops_per_s(std::string_view arithmetic) {
  const LinearWeight& weight = packed(arithmetic);
  const LinearArgs args{.x = {x_.data(), DType::kF32, {shape_.rows, shape_.inputs}},
                        .weight = &weight,
                        .out = {out_.data(), DType::kF32, {shape_.rows, shape_.outputs}}};
  backend_->linear(args);
  const SteadyClock clock;
  const int64_t start_us = clock.now_us();
  backend_->linear(args);
  const int64_t elapsed_us = std::max<int64_t>(1, clock.now_us() - start_us);
  return 2e6 * static_cast<double>(shape_.rows * shape_.outputs * shape_.inputs) /
         static_cast<double>(elapsed_us);
}

}  // namespace llmserve
