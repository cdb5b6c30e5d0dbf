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

// The rows of a weight: all scales and minima [N, scales], values [N, K] and codes [N, groups].
class RefRows {
 public:
  static int64_t num_bytes(const LinearFormat& format, int64_t n, int64_t k) {
    const int64_t scale_bytes = format.num_scales(k) * static_cast<int64_t>(sizeof(float));
    return n * (2 * scale_bytes + k + 2 * format.num_codes(k));
  }

  RefRows(const LinearFormat& format, int64_t n, int64_t k, std::byte* data)
      : format_(format),
        k_(k),
        scales_(reinterpret_cast<float*>(data)),
        mins_(scales_ + n * format.num_scales(k)),
        values_(reinterpret_cast<int8_t*>(mins_ + n * format.num_scales(k))),
        scale_codes_(values_ + n * k),
        min_codes_(scale_codes_ + n * format.num_codes(k)) {}

  QuantizedRow row(int64_t n) const {
    return {.values = values_ + n * k_,
            .scales = scales_ + n * format_.num_scales(k_),
            .mins = mins_ + n * format_.num_scales(k_),
            .scale_codes = scale_codes_ + n * format_.num_codes(k_),
            .min_codes = min_codes_ + n * format_.num_codes(k_)};
  }

 private:
  const LinearFormat& format_;
  const int64_t k_;
  float* scales_;
  float* mins_;
  int8_t* values_;
  int8_t* scale_codes_;
  int8_t* min_codes_;
};

// Of a group, its scale or minimum.
float group_scale(const LinearFormat& format, const float* scales, const int8_t* codes,
                  int64_t group) {
  const float shared = scales[group >> format.scale_shift];
  return format.has_scale_codes() ? shared * static_cast<float>(codes[group]) : shared;
}

}  // namespace

int64_t RefBackend::packed_bytes(int64_t out_features, int64_t in_features,
                                 const LinearFormat& format) const {
  return RefRows::num_bytes(format, out_features, in_features);
}

LinearWeight RefBackend::pack_quantized(const LinearFormat& format, int64_t out_features,
                                        int64_t in_features, const QuantizedRowReader& read) {
  LinearWeight weight{.out_features = out_features,
                      .in_features = in_features,
                      .format = &format,
                      .data = Buffer(packed_bytes(out_features, in_features, format))};
  const RefRows rows(format, out_features, in_features, weight.data.data());
  for (int64_t n = 0; n < out_features; ++n) read(n, rows.row(n));
  return weight;
}

void RefBackend::quantized_linear(const LinearArgs& args) {
  const LinearWeight& weight = *args.weight;
  const LinearFormat& format = *weight.format;
  const int64_t k = weight.in_features;
  const RefRows rows(format, weight.out_features, k, const_cast<std::byte*>(weight.data.data()));
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
      const QuantizedRow w = rows.row(n);
      float sum = 0;
      for (int64_t g = 0; g < num_groups; ++g) {
        const IntegerGroup& group = groups[static_cast<size_t>(g)];
        int32_t dot = 0;
        for (int64_t i = g * size; i < (g + 1) * size; ++i)
          dot += q[static_cast<size_t>(i)] * format.integer(w.values[i]);
        const float scale = group_scale(format, w.scales, w.scale_codes, g);
        const float min = group_scale(format, w.mins, w.min_codes, g);
        sum = sum + (scale * group.scale) * static_cast<float>(dot);
        if (format.has_min) sum = sum - min * (group.scale * static_cast<float>(group.sum));
      }
      if (args.bias) sum += args.bias.as<float>()[n];
      out[n] = args.accumulate ? sum + out[n] : sum;
    }
  }
}

}  // namespace llmserve
