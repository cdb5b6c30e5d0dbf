// Linear layers over formats made of their traits, as files of quantized weights need them.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "checker.h"
#include "checks.h"
#include "quant/linear_format.h"

namespace llmserve::isa_check {

namespace {

constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr float kValues[16] = {-1.0f,   -0.695f, -0.525f, -0.395f, -0.285f, -0.185f, -0.091f, 0.0f,
                               0.0796f, 0.161f,  0.246f,  0.338f,  0.441f,  0.563f,  0.723f,  1.0f};

// Numbers from 0 to `below` that follow no pattern of K or N.
int64_t number(int64_t i, int64_t j, int64_t below) {
  return static_cast<int64_t>(mix64(static_cast<uint64_t>(i), static_cast<uint64_t>(j)) %
                              static_cast<uint64_t>(below));
}

// All that the format can hold, the extremes in rows of their own.
void fill_row(const LinearFormat& format, int64_t i, int64_t k, const QuantizedRow& row) {
  const int64_t count = int64_t{1} << format.bits;
  const int64_t lowest = format.bits == 8 ? -count / 2 : 0;
  for (int64_t j = 0; j < k; ++j) {
    const int64_t q = i == 0 ? count - 1 : i == 1 ? 0 : number(i, j, count);
    row.values[j] = static_cast<int8_t>(lowest + q);
    if (format.is_fp8 && (row.values[j] & 127) == 127) row.values[j] ^= 8;  // not NaN
  }
  for (int64_t g = 0; g < format.num_groups(k); ++g) {
    const auto magnitude = static_cast<float>(1 + number(i + 7, g, 64)) * 0x1p-9f;
    row.scales[g] = stored_scale(format, magnitude);
    row.mins[g] = format.has_min ? 2 * row.scales[g] : 0.0f;
    if (format.has_zero) {
      const int64_t zero = i == 0 ? 0 : i == 1 ? count : number(i, g + 3, count + 1);
      row.zeros[g] = static_cast<int16_t>(lowest + zero);
    }
  }
  if (format.has_row_scale) *row.row_scale = 1.0f + static_cast<float>(i % 5) * 0.125f;
}

void check_format_case(Checker& check, const LinearFormat& format, int64_t rows, int64_t k,
                       int64_t n) {
  const Floats x = normal(rows * k, 21);
  std::fill_n(x.begin(), k, -3.0f);
  const Floats bias = normal(n, 22);
  auto order = std::make_shared<std::vector<int32_t>>(static_cast<size_t>(k));
  std::iota(order->begin(), order->end(), 0);
  std::swap(order->front(), order->back());
  const auto run = [&](Backend& backend, int64_t row, int64_t count) {
    LinearWeight weight = backend.pack_quantized(
        format, n, k, [&](int64_t i, const QuantizedRow& to) { fill_row(format, i, k, to); });
    weight.input_order = order;
    Floats out(count * (n + 5) - 5, 7.0f);
    backend.linear({.x = matrix(x, rows, k, k).slice(0, row, count),
                    .weight = &weight,
                    .bias = vector(bias),
                    .out = matrix(out, count, n, n + 5),
                    .accumulate = true});
    return out;
  };
  for (const int64_t m : {rows, int64_t{1}, std::min<int64_t>(rows, 6)}) {
    const std::string what = concat(format.name, " linear M ", m, " of ", rows, " K ", k, " N ", n);
    if (!format.has_float_products()) {
      check.same_as_ref(what, [&](Backend& backend) { return run(backend, rows - m, m); });
      continue;
    }
    for (const Isa& isa : check.isas) {
      const Floats all = run(*isa.backend, 0, rows);
      const Floats got = run(*isa.backend, rows - m, m);
      Floats same(got.size());
      std::copy_n(all.begin() + (rows - m) * (n + 5), same.size(), same.begin());
      check.equal(concat(isa.name, " the rows alone, ", what), got, same);
      const bool is_exact = isa.has_bf16_products() ? check.is_exact : isa.name != "generic";
      // Numbers are at most 448 and scales 1/8, of which FP8's largest are a row of their own.
      const float most = 4.0f * (format.is_fp8 ? 448.0f : 1.0f) * 0.125f * static_cast<float>(k);
      check.close(concat(isa.name, " ", what), got, run(*isa.ref, rows - m, m),
                  [&](int64_t) { return is_exact ? -1.0f : sum_tolerance(k + 2) * (most + 8.0f); });
    }
  }
}

}  // namespace

void check_formats(Checker& check) {
  const LinearFormat traits[] = {
      {.bits = 4, .group_size = 128, .scale_type = ScaleType::kF16, .has_zero = true},
      {.bits = 4, .group_size = 64, .scale_type = ScaleType::kBF16},
      {.bits = 4, .group_size = 0, .has_zero = true},
      {.bits = 4, .group_size = 48, .has_min = true, .scale_type = ScaleType::kBF16},
      {.bits = 3, .group_size = 128, .scale_type = ScaleType::kF16, .has_zero = true},
      {.bits = 2, .group_size = 64, .scale_type = ScaleType::kBF16, .has_zero = true},
      {.bits = 5, .group_size = 32, .has_zero = true},
      {.bits = 6, .group_size = 128, .scale_type = ScaleType::kBF16, .has_zero = true},
      {.bits = 8, .group_size = 128, .scale_type = ScaleType::kF16, .has_zero = true},
      {.bits = 8, .group_size = 96},
      {.bits = 8, .group_size = 0, .has_zero = true},
      {.bits = 4,
       .group_size = 16,
       .scale_type = ScaleType::kE4M3,
       .table = kTable,
       .has_row_scale = true},
      {.bits = 8, .outlier_threshold = 2.0f},
      {.is_fp8 = true},
      {.group_size = 128, .is_fp8 = true},
      {.group_size = 256, .scale_type = ScaleType::kBF16, .is_fp8 = true},
      {.bits = 4, .group_size = 64, .values = kValues},
      {.bits = 4, .has_row_scale = true, .values = kValues},
  };
  for (const LinearFormat& each : traits) {
    const LinearFormat& format = linear_format(each);
    check_format_case(check, format, 3, 40, 17);
    check_format_case(check, format, 21, 384, 50);
    check_format_case(check, format, 9, 1352, 33);
    check_format_case(check, format, 70, 1000, 140);
    check_format_case(check, format, 300, 200, 17);  // blocks of rows
    check_format_case(check, format, 66, 8200, 34);  // blocks of panels
  }
}

}  // namespace llmserve::isa_check
