// Linear layers: in floats, over integers, and of several weights.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "checker.h"
#include "checks.h"
#include "quant/quant_format.h"

namespace llmserve::isa_check {

namespace {

// The Euclidean lengths of the rows of a matrix.
std::vector<float> lengths(const Floats& x, int64_t rows, int64_t width, int64_t stride) {
  std::vector<float> result;
  for (int64_t r = 0; r < rows; ++r) {
    float sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += x[r * stride + i] * x[r * stride + i];
    result.push_back(std::sqrt(sum));
  }
  return result;
}

// One weight and `rows` rows of x; then the first m rows for every m, which must keep their bits.
void check_linear_case(Checker& check, DType dtype, int64_t rows, int64_t k, int64_t n, bool full) {
  const int64_t x_stride = k + 3;
  const int64_t out_stride = n + 5;
  const Floats x = normal(rows * x_stride - 3, 11);
  const Floats w = normal(n * k, 12);
  const Floats bias = normal(n, 13);
  const Array<uint16_t> halves = to_16_bits(w, DType::kF16);
  const int64_t split = n / 3;  // the weight's first rows come as f32, the rest as f16
  std::vector<ConstTensor> parts{
      ConstTensor(halves.begin() + split * k, DType::kF16, {n - split, k})};
  if (split > 0) parts.insert(parts.begin(), ConstTensor(w.begin(), DType::kF32, {split, k}));
  const auto run = [&](Backend& backend, const LinearWeight& weight, int64_t row, int64_t count) {
    // What lies between the rows of out must survive.
    Floats out(count * out_stride - 5, 7.0f);
    backend.linear({.x = matrix(x, rows, k, x_stride).slice(0, row, count),
                    .weight = &weight,
                    .bias = full ? vector(bias) : Tensor{},
                    .out = matrix(out, count, n, out_stride),
                    .accumulate = full});
    return out;
  };
  const std::string what =
      concat("linear ", name(dtype), " M ", rows, " K ", k, " N ", n, full ? " + bias + out" : "");
  const std::vector<float> x_lengths = lengths(x, rows, k, x_stride);
  const std::vector<float> w_lengths = lengths(w, n, k, k);
  std::vector<Floats> fused;  // of the first instruction set with an fma
  for (const Isa& isa : check.isas) {
    const LinearWeight weight = isa.backend->pack_linear(parts, dtype);
    check.report(weight.data.num_bytes() == isa.backend->packed_bytes(n, k, dtype),
                 concat(isa.name, " packed_bytes of ", what));
    const Floats all = run(*isa.backend, weight, 0, rows);
    const Floats want = run(*isa.ref, isa.ref->pack_linear(parts, dtype), 0, rows);
    const bool has_bf16_products = dtype == DType::kBF16 && isa.has_bf16_products();
    check.close(concat(isa.name, " ", what), all, want, [&](int64_t i) {
      const int64_t column = i % out_stride;
      if (column >= n || (has_bf16_products && check.is_exact)) return -1.0f;
      // The sum of |x_i w_i| is at most this.
      const float terms =
          x_lengths[static_cast<size_t>(i / out_stride)] * w_lengths[static_cast<size_t>(column)];
      return sum_tolerance(k + 2) * (terms + 8.0f);  // 8: bias and what out held
    });
    // Generic multiplies and adds; the others make one chain of fma.
    if (isa.name != "generic" && !has_bf16_products) {
      if (fused.empty()) fused.push_back(all);
      check.equal(concat(isa.name, " and ", check.isas[0].name, ", ", what), all, fused[0]);
    }
    const LinearWeight deferred = isa.backend->defer_linear(parts, dtype);
    check.equal(concat(isa.name, " on the weight's rows, ", what),
                run(*isa.backend, deferred, 0, rows), all);
    for (int64_t m = 1; m < rows; m += m < 34 ? 1 : 31) {
      const int64_t row = m == 1 ? rows - 1 : 0;  // M = 1 is the last row: no tile's first
      const Floats some = run(*isa.backend, weight, row, m);
      Floats same(some.size());
      std::copy_n(all.begin() + row * out_stride, same.size(), same.begin());
      check.equal(concat(isa.name, " the rows alone, M ", m, " of ", what), some, same);
    }
  }
}

// A row of integers that files have: all that the format can hold, the extremes side by side.
void fill_row(const LinearFormat& format, int64_t i, int64_t k, const QuantizedRow& row) {
  const int64_t count = int64_t{1} << format.bits;
  for (int64_t j = 0; j < k; ++j) {
    const int64_t q = i == 0 ? count - 1 : (i * 131 + j * 29 + j * j / 7) % count;
    row.values[j] = static_cast<int8_t>(format.bits == 8 ? q - count / 2 : q);
  }
  for (int64_t g = 0; g < format.num_scales(k); ++g) {
    row.scales[g] = stored_scale(format, static_cast<float>((i + g) % 13 - 6) * 0x1p-5f);
    row.mins[g] = format.has_min ? static_cast<float>((i + 2 * g) % 11 - 5) * 0x1p-4f : 0.0f;
  }
  if (format.has_row_scale) *row.row_scale = static_cast<float>(i % 5 + 1) * 0x1p-3f;
  for (int64_t g = 0; g < format.num_codes(k); ++g) {
    row.scale_codes[g] = static_cast<int8_t>((i * 37 + g * 53) % 256 - 128);
    row.min_codes[g] =
        format.has_min ? static_cast<int8_t>((i * 29 + g * 71) % 256 - 128) : int8_t{0};
  }
}

// Over integers, the bits of ref; rows whose values are extreme, tiny, zero or bad among others.
// Weights are rounded, or as fill_row has them.
void check_quantized_case(Checker& check, const LinearFormat& format, int64_t rows, int64_t k,
                          int64_t n, bool is_of_file = false) {
  const Floats w = normal(n * k, 14);
  for (int64_t i = 0; i < k; ++i) {
    w[i] = i % 3 == 0 ? -1.0f : 1.0f;
    w[(n - 1) * k + i] *= 1e6f;
  }
  const Floats bias = normal(n, 15);
  const int64_t x_stride = k + 3;
  const Floats x = normal(rows * x_stride - 3, 16);
  for (int64_t i = 0; i < k; ++i) x[i] = w[i];
  if (rows > 4) {
    x[2 * x_stride] = kNan;
    x[3 * x_stride + k - 1] = kInf;
    std::fill_n(x.begin() + 4 * x_stride, k, 1e-35f);
  }
  const auto run = [&](Backend& backend, int64_t row, int64_t count) {
    const LinearWeight weight =
        backend.pack_quantized(format, n, k, [&](int64_t i, const QuantizedRow& to) {
          is_of_file ? fill_row(format, i, k, to) : quantize_row(format, w.begin() + i * k, k, to);
        });
    Floats out(count * (n + 5) - 5, 7.0f);
    backend.linear({.x = matrix(x, rows, k, x_stride).slice(0, row, count),
                    .weight = &weight,
                    .bias = vector(bias),
                    .out = matrix(out, count, n, n + 5),
                    .accumulate = true});
    return out;
  };
  for (const int64_t m : {rows, int64_t{1}, std::min<int64_t>(rows, 6)})
    check.same_as_ref(concat(format.name, " linear M ", m, " of ", rows, " K ", k, " N ", n),
                      [&](Backend& backend) { return run(backend, rows - m, m); });
}

}  // namespace

void check_quantized(Checker& check) {
  for (const LinearFormat& format : linear_format_registry()) {
    check_quantized_case(check, format, 3, 128, 16);
    check_quantized_case(check, format, 21, 384, 50);
    check_quantized_case(check, format, 9, 1024, 33);
    check_quantized_case(check, format, 150, 256, 17);   // blocks of rows
    check_quantized_case(check, format, 66, 16384, 50);  // blocks of panels
    if (format.group_size > 0) continue;
    for (const int64_t k : {1, 7, 65, 1027}) check_quantized_case(check, format, 10, k, 17);
  }
  for (const QuantFormat& format : quant_format_registry()) {
    if (!format.integers) continue;
    check_quantized_case(check, *format.integers, 9, 1280, 33, true);
    check_quantized_case(check, *format.integers, 70, 512, 50, true);
  }
}

void check_linear(Checker& check) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool full : {false, true}) {
      check_linear_case(check, dtype, 3, 1, 1, full);
      check_linear_case(check, dtype, 34, 7, 15, full);
      check_linear_case(check, dtype, 40, 64, 16, full);
      check_linear_case(check, dtype, 34, 65, 33, full);
      check_linear_case(check, dtype, 34, 40, 97, full);
      check_linear_case(check, dtype, 20, 1027, 17, full);
    }
    check_linear_case(check, dtype, 193, 513, 50, true);  // blocks of rows, of K
    check_linear_case(check, dtype, 98, 33, 530, true);   // blocks of panels
    check_linear_case(check, dtype, 73, 2051, 17, true);  // deep blocks of K
  }
}

namespace {

// Rows of three weights, one of which is idle, beside linear over each row alone.
void check_grouped_linear_case(Checker& check, DType dtype, int64_t k) {
  const int64_t n = 37;
  const int64_t tokens = 4;
  const std::vector<int32_t> ids{2, 0, 2, 0, 0, 2, 2, 0};
  const int64_t rows = std::ssize(ids);
  const Floats x = normal(tokens * k, 21);
  for (const Isa& isa : check.isas) {
    std::vector<LinearWeight> weights;
    for (uint64_t w = 0; w < 3; ++w) {
      const Floats values = normal(n * k, 22 + w);
      const ConstTensor part(values.begin(), DType::kF32, {n, k});
      weights.push_back(isa.backend->pack_linear(std::span(&part, 1), dtype));
    }
    const std::vector<const LinearWeight*> pointers{&weights[0], &weights[1], &weights[2]};
    const Floats out(rows * n), alone(rows * n);
    isa.backend->grouped_linear({.x = matrix(x, tokens, k, k),
                                 .weights = pointers,
                                 .weight_ids = ConstTensor(ids.data(), DType::kI32, {rows}),
                                 .out = matrix(out, rows, n, n)});
    for (int64_t r = 0; r < rows; ++r) {
      const size_t i = static_cast<size_t>(r);
      isa.backend->linear({.x = matrix(x, tokens, k, k).slice(0, r / 2, 1),
                           .weight = pointers[static_cast<size_t>(ids[i])],
                           .out = matrix(alone, rows, n, n).slice(0, r, 1)});
    }
    check.equal(concat(isa.name, " grouped_linear ", name(dtype), " K ", k), out, alone);
  }
}

}  // namespace

void check_grouped_linear(Checker& check) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int64_t k : {17, 64, 640}) check_grouped_linear_case(check, dtype, k);
}

}  // namespace llmserve::isa_check
