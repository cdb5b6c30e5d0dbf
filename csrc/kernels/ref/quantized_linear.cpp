#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "core/float_types.h"
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

// The rows of a weight: all scales and minima [N, scales], scales of rows [N], zero points [N,
// groups], values [N, K] and codes [N, groups].
class RefRows {
 public:
  static int64_t num_bytes(const LinearFormat& format, int64_t n, int64_t k) {
    const int64_t floats = 2 * format.num_scales(k) + (format.has_row_scale ? 1 : 0);
    return n * (floats * 4 + format.num_zeros(k) * 2 + k + 2 * format.num_codes(k));
  }

  RefRows(const LinearFormat& format, int64_t n, int64_t k, std::byte* data)
      : format_(format),
        k_(k),
        scales_(reinterpret_cast<float*>(data)),
        mins_(scales_ + n * format.num_scales(k)),
        row_scales_(mins_ + n * format.num_scales(k)),
        zeros_(reinterpret_cast<int16_t*>(row_scales_ + (format.has_row_scale ? n : 0))),
        values_(reinterpret_cast<int8_t*>(zeros_ + n * format.num_zeros(k))),
        scale_codes_(values_ + n * k),
        min_codes_(scale_codes_ + n * format.num_codes(k)) {}

  QuantizedRow row(int64_t n) const {
    return {.values = values_ + n * k_,
            .scales = scales_ + n * format_.num_scales(k_),
            .mins = mins_ + n * format_.num_scales(k_),
            .scale_codes = scale_codes_ + n * format_.num_codes(k_),
            .min_codes = min_codes_ + n * format_.num_codes(k_),
            .zeros = zeros_ + n * format_.num_zeros(k_),
            .row_scale = format_.has_row_scale ? row_scales_ + n : nullptr};
  }

 private:
  const LinearFormat& format_;
  const int64_t k_;
  float* scales_;
  float* mins_;
  float* row_scales_;
  int16_t* zeros_;
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

// A row of x [K], in the weight's order.
std::vector<float> ordered_row(const LinearWeight& weight, const float* x) {
  const int64_t k = weight.in_features;
  if (!weight.input_order) return {x, x + k};
  std::vector<float> row;
  for (const int32_t column : *weight.input_order) row.push_back(x[column]);
  return row;
}

bool is_outlier(const LinearFormat& format, float x) {
  return format.outlier_threshold > 0 && std::isfinite(x) &&
         std::fabs(x) >= format.outlier_threshold;
}

// A row of x as integers, and the products of a weight's rows with it.
class IntegerRow {
 public:
  IntegerRow(const LinearFormat& format, std::vector<float> x)
      : format_(format), k_(std::ssize(x)), q_(x.size()) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (!is_outlier(format, x[i])) continue;
      outliers_.emplace_back(i, x[i]);
      x[i] = 0;
    }
    const int64_t size = format.group_elements(k_);
    for (int64_t begin = 0; begin < k_; begin += size)
      groups_.push_back(
          round_group(x.data() + begin, std::min(size, k_ - begin), q_.data() + begin));
  }

  float times(const QuantizedRow& w) const {
    const int64_t size = format_.group_elements(k_);
    float sum = 0;
    for (int64_t g = 0; g < std::ssize(groups_); ++g) {
      const IntegerGroup& group = groups_[static_cast<size_t>(g)];
      const int zero = format_.has_zero ? w.zeros[g] : 0;
      int32_t dot = 0;
      for (int64_t i = g * size; i < std::min((g + 1) * size, k_); ++i)
        dot += q_[static_cast<size_t>(i)] * format_.integer(w.values[i], zero);
      const float scale = group_scale(format_, w.scales, w.scale_codes, g);
      const float min = group_scale(format_, w.mins, w.min_codes, g);
      sum = sum + (scale * group.scale) * static_cast<float>(dot);
      if (format_.has_min) sum = sum - min * (group.scale * static_cast<float>(group.sum));
    }
    return format_.has_row_scale ? sum * *w.row_scale : sum;
  }

  bool has_outliers() const { return !outliers_.empty(); }
  float outliers_times(const QuantizedRow& w) const {
    float sum = 0;
    for (const auto& [i, x] : outliers_)
      sum = sum + x * static_cast<float>(format_.integer(w.values[i]));
    return w.scales[0] * sum;
  }

 private:
  const LinearFormat& format_;
  const int64_t k_;
  std::vector<int8_t> q_;
  std::vector<IntegerGroup> groups_;
  std::vector<std::pair<size_t, float>> outliers_;
};

// What q stands for, of a format whose products are of floats.
float float_of(const LinearFormat& format, int8_t q) {
  return format.values ? format.values[q] : fp8_to_f32(static_cast<uint8_t>(q));
}

// The product of a row of such a format with a row of x [K], rounded to bf16 unless kNone.
float times_floats(const LinearFormat& format, Bf16Products how, const std::vector<float>& x,
                   const QuantizedRow& w) {
  const int64_t k = std::ssize(x);
  const int64_t size = format.group_elements(k);
  // Tiles of AMX are not used beside such weights.
  const Bf16Products pairs = how == Bf16Products::kNone ? how : Bf16Products::kPairs;
  float sum = 0;
  for (int64_t g = 0; g < format.num_groups(k); ++g) {
    const int64_t begin = g * size;
    const int64_t end = std::min(begin + size, k);
    float chain = 0;
    if (pairs == Bf16Products::kNone) {
      for (int64_t i = begin; i < end; ++i)
        chain = std::fma(x[static_cast<size_t>(i)], float_of(format, w.values[i]), chain);
    } else {
      std::vector<uint16_t> a, b;
      for (int64_t i = begin; i < end; ++i) {
        a.push_back(round_to_bf16(x[static_cast<size_t>(i)]));
        b.push_back(f32_to_bf16(float_of(format, w.values[i])));
      }
      chain = dot_bf16(pairs, a.data(), b.data(), end - begin);
    }
    sum = std::fma(group_scale(format, w.scales, w.scale_codes, g), chain, sum);
  }
  return format.has_row_scale ? sum * *w.row_scale : sum;
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
  const RefRows rows(format, weight.out_features, weight.in_features,
                     const_cast<std::byte*>(weight.data.data()));
  for (int64_t m = 0; m < args.x.shape[0]; ++m) {
    const std::vector<float> x = ordered_row(weight, args.x.as<float>() + m * args.x.strides[0]);
    const std::optional<IntegerRow> integers =
        format.has_float_products() ? std::nullopt : std::make_optional<IntegerRow>(format, x);
    float* out = args.out.as<float>() + m * args.out.strides[0];
    for (int64_t n = 0; n < weight.out_features; ++n) {
      const QuantizedRow w = rows.row(n);
      float sum = integers ? integers->times(w) : times_floats(format, bf16_, x, w);
      if (args.bias) sum += args.bias.as<float>()[n];
      out[n] = args.accumulate ? sum + out[n] : sum;
      if (integers && integers->has_outliers()) out[n] = out[n] + integers->outliers_times(w);
    }
  }
}

}  // namespace llmserve
