// Ops of single rows, and those that store to the KV cache.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "checker.h"
#include "checks.h"
#include "kernels/host_ops.h"

namespace llmserve::isa_check {
namespace {

constexpr float kElementwiseTolerance = 8 * 0x1p-24f;
// The widths that exercise full vectors, tails and both.
constexpr int64_t kWidths[] = {1, 3, 8, 15, 16, 17, 31, 33, 64, 100, 131, 640, 1027};

}  // namespace

void check_norms(Checker& check) {
  for (const int64_t width : kWidths) {
    const int64_t rows = 5;
    const int64_t stride = width + 3;
    const Floats x = normal(rows * stride - 3, 1);
    const Floats weight = normal(width, 2);
    const auto norm = [&](Backend& backend, int64_t row, int64_t count) {
      Floats out(count * width);
      backend.rms_norm({.x = matrix(x, rows, width, stride).slice(0, row, count),
                        .weight = vector(weight),
                        .out = matrix(out, count, width, width),
                        .numbers = {.eps = 1e-5f, .weight_offset = 1.0f}});
      return out;
    };
    const auto relative = [&](int64_t, float want) {
      return sum_tolerance(width) * std::fabs(want);
    };
    check.against_ref(
        concat("rms_norm width ", width), [&](Backend& backend) { return norm(backend, 0, rows); },
        relative);
    for (const Isa& isa : check.isas) {
      const Floats all = norm(*isa.backend, 0, rows);
      Floats alone(rows * width);
      for (int64_t r = 0; r < rows; ++r) {
        const Floats row = norm(*isa.backend, r, 1);
        std::copy(row.begin(), row.end(), alone.begin() + r * width);
      }
      check.equal(concat(isa.name, " rms_norm rows alone, width ", width), alone, all);
    }
    check.against_ref(
        concat("layer_norm width ", width),
        [&](Backend& backend) {
          Floats out(rows * width);
          backend.layer_norm({.x = matrix(x, rows, width, stride),
                              .weight = vector(weight),
                              .bias = vector(weight),
                              .out = matrix(out, rows, width, width),
                              .numbers = {.eps = 1e-5f, .weight_offset = 0.5f}});
          return out;
        },
        // The mean is taken off terms of up to 8, and the bias may cancel.
        [&](int64_t, float want) { return sum_tolerance(width) * (8 + std::fabs(want)); });
    // residual and out in one array, so that both are compared.
    check.against_ref(
        concat("add_rms_norm width ", width),
        [&](Backend& backend) {
          const Floats start = normal(rows * width, 3);
          Floats both(2 * rows * width);
          std::copy(start.begin(), start.end(), both.begin());
          Tensor out(both.begin() + rows * width, DType::kF32, {rows, width});
          const Floats y = normal(rows * width, 4);
          backend.add_rms_norm({.residual = matrix(both, rows, width, width),
                                .x = matrix(y, rows, width, width),
                                .weight = vector(weight),
                                .out = out});
          return both;
        },
        [&](int64_t i, float want) { return i < rows * width ? -1.0f : relative(i, want); });
  }
}

void check_activations(Checker& check) {
  for (const int64_t width : kWidths) {
    for (size_t i = 0; i < std::size(kActivations); ++i) {
      const auto activation = static_cast<Activation>(i);
      Floats gate_up = normal(3 * 2 * width, 5);
      for (float& value : gate_up) value *= 9;
      const float special[] = {0.0f, -0.0f, -120.0f, 120.0f, kNan, -88.5f, 1e-40f};
      for (int64_t i = 0; i < std::min<int64_t>(7, width); ++i) gate_up[width - 1 - i] = special[i];
      check.against_ref(
          concat("gated_activation ", name(activation), " width ", width),
          [&](Backend& backend) {
            Floats out(3 * width);
            backend.gated_activation({.gate_up = matrix(gate_up, 3, 2 * width, 2 * width),
                                      .out = matrix(out, 3, width, width),
                                      .activation = activation});
            return out;
          },
          // exp(y) of a rounded y is off by |y| * 2^-24; |y| < 90.
          [](int64_t, float want) {
            return 90 * kElementwiseTolerance * std::fabs(want) + 1e-36f;
          });
    }
    check.against_ref(
        concat("cap_logits width ", width),
        [&](Backend& backend) {
          Floats logits = normal(3 * width, 6);
          backend.cap_logits(
              {.logits = matrix(logits, 3, width, width), .scale = 20.0f, .soft_cap = 30.0f});
          return logits;
        },
        // Two tanh within 2^-23, and a rounded argument and product each.
        [](int64_t, float) { return 30 * 0x1p-21f; });
  }
}

void check_rotary(Checker& check) {
  const int64_t heads = 3;
  const std::vector<int32_t> positions{0, 1, 77, 131071};
  const int64_t tokens = static_cast<int64_t>(positions.size());
  for (const auto& widths :
       {std::pair<int64_t, int64_t>{2, 2}, {20, 16}, {64, 64}, {80, 32}, {128, 128}, {96, 34}}) {
    const int64_t head_dim = widths.first, rotated = widths.second;  // Clang 14 captures no binding
    std::vector<float> inv_freq;
    for (int64_t i = 0; i < rotated / 2; ++i)
      inv_freq.push_back(
          std::pow(1e4f, -2.0f * static_cast<float>(i) / static_cast<float>(rotated)));
    const auto table = [&](Backend& backend) {
      Floats cos_sin(tokens * rotated);
      backend.rotary_table({.positions = positions,
                            .inv_freq = inv_freq,
                            .scale = 1.25f,
                            .growth = 0.1f,
                            .period = 16,
                            .cos_sin = matrix(cos_sin, tokens, rotated, rotated)});
      return cos_sin;
    };
    const auto absolute = [](int64_t, float) { return 8 * kElementwiseTolerance; };
    check.against_ref(concat("rotary_table d ", rotated), table, absolute);
    const Floats cos_sin = table(*check.ref);
    for (const bool interleaved : {false, true}) {
      check.against_ref(
          concat("rotary D ", head_dim, " d ", rotated, interleaved ? " interleaved" : ""),
          [&](Backend& backend) {
            const int64_t stride = heads * head_dim + 5;
            Floats x = normal(tokens * stride, 6);
            Tensor view(x.begin(), DType::kF32, {tokens, heads, head_dim});
            view.strides[0] = stride;
            backend.rotary({.heads = view,
                            .cos_sin = matrix(cos_sin, tokens, rotated, rotated),
                            .interleaved = interleaved});
            return x;
          },
          absolute);
    }
  }
}

void check_rows_and_cache(Checker& check) {
  for (const int64_t width : kWidths) {
    const Floats values = normal(7 * width, 7);
    const std::vector<int32_t> ids{6, 0, 3, 3, 5};
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const Array<uint16_t> halves = to_16_bits(values, dtype);
      const ConstTensor table(
          dtype == DType::kF32 ? static_cast<const void*>(values.begin()) : halves.begin(), dtype,
          {7, width});
      check.same_as_ref(concat("embedding ", name(dtype), " width ", width), [&](Backend& backend) {
        Floats out(5 * width);
        backend.embedding(
            {.table = table, .token_ids = ids, .out = matrix(out, 5, width, width), .scale = 1.3f});
        return out;
      });
    }
    check.same_as_ref(concat("gather_rows width ", width), [&](Backend& backend) {
      Floats out(5 * width);
      backend.gather_rows(
          {.x = matrix(values, 7, width, width), .rows = ids, .out = matrix(out, 5, width, width)});
      return out;
    });
    // 3 tokens into 4 blocks of 5 slots, 2 heads; then blocks are copied.
    const int64_t value_width = width / 2 + 1;
    const Floats keys = normal(3 * 2 * width, 8);
    keys[0] = kNan;
    keys[1] = 0x1.01p0f;  // halfway between two bf16: to even
    const Floats cached = normal(3 * 2 * value_width, 9);
    const std::vector<int64_t> slots{7, -1, 19};
    const std::vector<std::pair<int32_t, int32_t>> pairs{{1, 2}, {2, 0}};
    const auto store = [&]<class T>(Backend& backend, DType dtype, T) {
      Array<T> cache(4 * 2 * 5 * (width + value_width));
      const PagedKvCache kv{
          Tensor(cache.begin(), dtype, {4, 2, 5, width}),
          Tensor(cache.begin() + 4 * 2 * 5 * width, dtype, {4, 2, 5, value_width})};
      backend.store_kv({.keys = ConstTensor(keys.begin(), DType::kF32, {3, 2, width}),
                        .values = ConstTensor(cached.begin(), DType::kF32, {3, 2, value_width}),
                        .slots = slots,
                        .cache = kv});
      backend.copy_blocks({.pairs = pairs, .cache = kv});
      return cache;
    };
    check.same_as_ref(concat("store_kv float32 width ", width),
                      [&](Backend& backend) { return store(backend, DType::kF32, 0.0f); });
    check.same_as_ref(concat("store_kv bfloat16 width ", width),
                      [&](Backend& backend) { return store(backend, DType::kBF16, uint16_t{0}); });
  }
}

void check_first_non_finite(Checker& check) {
  for (const int64_t size : {1, 7, 16, 33, 1000, 20000}) {
    for (const int64_t bad : {int64_t{-1}, int64_t{0}, size / 2, size - 1}) {
      Floats x = normal(size, 10);
      if (bad >= 0) x[size - 1] = kNan;
      if (bad >= 0) x[bad] = bad % 2 == 0 ? -kInf : kNan;
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        const Array<uint16_t> halves = to_16_bits(x, dtype);
        const void* data =
            dtype == DType::kF32 ? static_cast<const void*>(x.begin()) : halves.begin();
        for (const Isa& isa : check.isas)
          check.report(isa.backend->first_non_finite(ConstTensor(data, dtype, {size})) == bad,
                       concat(isa.name, " first_non_finite ", name(dtype), " ", bad, " of ", size));
      }
    }
  }
}

}  // namespace llmserve::isa_check
