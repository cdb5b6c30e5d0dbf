#include <vector>

#include "core/float_types.h"
#include "kernels/host_ops.h"
#include "kernels/ref/ref_backend.h"

namespace llmserve {

int64_t RefBackend::packed_bytes(int64_t out_features, int64_t in_features, DType dtype) const {
  return out_features * in_features * size_bytes(dtype);
}

// Row-major [N, K], the parts one after another.
LinearWeight RefBackend::pack_linear(std::span<const ConstTensor> parts, DType dtype) {
  const int64_t n = check_linear_parts(parts, dtype);
  const int64_t k = parts[0].shape[1];
  LinearWeight weight{.out_features = n,
                      .in_features = k,
                      .dtype = dtype,
                      .data = Buffer(packed_bytes(n, k, dtype))};
  std::byte* to = weight.data.data();
  for (const ConstTensor& part : parts) {
    if (dtype == DType::kF32)
      convert_to_f32(part, 0, part.num_elements(), reinterpret_cast<float*>(to));
    else
      convert_to_bf16(part, 0, part.num_elements(), reinterpret_cast<uint16_t*>(to));
    to += part.num_elements() * size_bytes(dtype);
  }
  return weight;
}

void RefBackend::do_linear(const LinearArgs& args) {
  const LinearWeight& weight = *args.weight;
  if (weight.format) return quantized_linear(args);
  if (weight.dtype == DType::kBF16 && bf16_ != Bf16Products::kNone) return bf16_linear(args);
  const auto* w_f32 = reinterpret_cast<const float*>(weight.data.data());
  const auto* w_bf16 = reinterpret_cast<const uint16_t*>(weight.data.data());
  for (int64_t m = 0; m < args.x.shape[0]; ++m) {
    const float* x = args.x.as<float>() + m * args.x.strides[0];
    float* out = args.out.as<float>() + m * args.out.strides[0];
    for (int64_t n = 0; n < weight.out_features; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < weight.in_features; ++k) {
        const int64_t i = n * weight.in_features + k;
        sum += x[k] * (weight.dtype == DType::kF32 ? w_f32[i] : bf16_to_f32(w_bf16[i]));
      }
      if (args.bias) sum += args.bias.as<float>()[n];
      out[n] = args.accumulate ? sum + out[n] : sum;
    }
  }
}

void RefBackend::do_grouped_linear(const GroupedLinearArgs& args) {
  check_weight_ids(args);
  const int64_t rows = args.out.shape[0];
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t id = args.weight_ids.as<int32_t>()[r];
    if (id < 0) continue;
    do_linear({.x = args.x.slice(0, r / (rows / args.x.shape[0]), 1),
               .weight = args.weights[static_cast<size_t>(id)],
               .bias = args.bias ? bias_of_weight(args, id) : ConstTensor{},
               .out = args.out.slice(0, r, 1)});
  }
}

void RefBackend::bf16_linear(const LinearArgs& args) {
  const LinearWeight& weight = *args.weight;
  const int64_t k = weight.in_features;
  const auto* w = reinterpret_cast<const uint16_t*>(weight.data.data());
  std::vector<uint16_t> x(static_cast<size_t>(k));
  for (int64_t m = 0; m < args.x.shape[0]; ++m) {
    const float* from = args.x.as<float>() + m * args.x.strides[0];
    for (int64_t i = 0; i < k; ++i) x[static_cast<size_t>(i)] = round_to_bf16(from[i]);
    float* out = args.out.as<float>() + m * args.out.strides[0];
    for (int64_t n = 0; n < weight.out_features; ++n) {
      float sum = dot_bf16(bf16_, x.data(), w + n * k, k);
      if (args.bias) sum += args.bias.as<float>()[n];
      out[n] = args.accumulate ? sum + out[n] : sum;
    }
  }
}

}  // namespace llmserve
