#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/ref/ref_backend.h"

namespace llmserve {
namespace {

// One group of a row of x as integers.
struct IntegerGroup {
  float scale = 0;
  int32_t sum = 0;
};

IntegerGroup round_group(const float* x, int64_t n, int8_t* q) {
  float most = 0;
  bool is_finite = true;
  for (int64_t i = 0; i < n; ++i) {
    is_finite = is_finite && std::isfinite(x[i]);
    most = std::max(most, std::fabs(x[i]));
  }
  std::fill_n(q, n, int8_t{0});
  if (!is_finite) return {.scale = std::numeric_limits<float>::quiet_NaN()};
  if (most < 1e-30f) return {};
  IntegerGroup group{.scale = most / 127.0f};
  const float inverse = 127.0f / most;
  for (int64_t i = 0; i < n; ++i) {
    q[i] = static_cast<int8_t>(std::nearbyint(x[i] * inverse));
    group.sum += q[i];
  }
  return group;
}

struct RefWeight {
  const int8_t* values;  // [N, K]
  const float* scales;   // [N, groups]
  const float* mins;     // [N, groups]
};

RefWeight parts_of(const LinearWeight& weight) {
  const int64_t elements = weight.out_features * weight.in_features;
  const int64_t groups = weight.out_features * weight.format->num_groups(weight.in_features);
  const std::byte* data = weight.data.data();
  const auto* scales = reinterpret_cast<const float*>(data + (elements + 3) / 4 * 4);
  return {reinterpret_cast<const int8_t*>(data), scales, scales + groups};
}

}  // namespace

int64_t RefBackend::packed_bytes(int64_t out_features, int64_t in_features,
                                 const LinearFormat& format) const {
  const int64_t elements = (out_features * in_features + 3) / 4 * 4;
  return elements + 2 * out_features * format.num_groups(in_features) * 4;
}

LinearWeight RefBackend::pack_quantized(const LinearFormat& format, int64_t out_features,
                                        int64_t in_features, const QuantizedRowReader& read) {
  LinearWeight weight{.out_features = out_features,
                      .in_features = in_features,
                      .format = &format,
                      .data = Buffer(packed_bytes(out_features, in_features, format))};
  const RefWeight to = parts_of(weight);
  const int64_t groups = format.num_groups(in_features);
  for (int64_t n = 0; n < out_features; ++n)
    read(n, {.values = const_cast<int8_t*>(to.values) + n * in_features,
             .scales = const_cast<float*>(to.scales) + n * groups,
             .mins = const_cast<float*>(to.mins) + n * groups});
  return weight;
}

void RefBackend::quantized_linear(const LinearArgs& args) {
  const LinearWeight& weight = *args.weight;
  const LinearFormat& format = *weight.format;
  const RefWeight w = parts_of(weight);
  const int64_t k = weight.in_features;
  const int64_t num_groups = format.num_groups(k);
  const int64_t size = format.group_elements(k);
  std::vector<int8_t> q(static_cast<size_t>(k));
  std::vector<IntegerGroup> groups(static_cast<size_t>(num_groups));
  for (int64_t m = 0; m < args.x.shape[0]; ++m) {
    const float* x = args.x.as<float>() + m * args.x.strides[0];
    float* out = args.out.as<float>() + m * args.out.strides[0];
    for (int64_t g = 0; g < num_groups; ++g)
      groups[static_cast<size_t>(g)] = round_group(x + g * size, size, q.data() + g * size);
    for (int64_t n = 0; n < weight.out_features; ++n) {
      float sum = 0;
      for (int64_t g = 0; g < num_groups; ++g) {
        const IntegerGroup& group = groups[static_cast<size_t>(g)];
        int32_t dot = 0;
        for (int64_t i = g * size; i < (g + 1) * size; ++i)
          dot += q[static_cast<size_t>(i)] * (w.values[n * k + i] - format.zero_point());
        const int64_t at = n * num_groups + g;
        sum = sum + (w.scales[at] * group.scale) * static_cast<float>(dot);
        if (format.has_min) sum = sum - w.mins[at] * (group.scale * static_cast<float>(group.sum));
      }
      if (args.bias) sum += args.bias.as<float>()[n];
      out[n] = args.accumulate ? sum + out[n] : sum;
    }
  }
}

}  // namespace llmserve
