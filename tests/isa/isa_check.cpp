// Every op of the cpu backend, under every instruction set that this machine can run, against the
// ref backend, and bit for bit against itself where kernels/ops.h promises the same bits. Needs no
// Python and links statically, so that it also runs in an emulated machine (run_emulated.sh).
//
//   isa_check [--threads N] [--exact] [ISA …]   the named sets only, and all of them must run;
//                                               exact: products of bf16 have the manual's bits
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "checker.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/host_ops.h"
#include "quant/quant_format.h"

namespace llmserve::isa_check {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// tests/parity: n terms with roundings of random signs, and a factor of 8 for the tail.
float sum_tolerance(int64_t n) { return 8 * std::sqrt(static_cast<float>(n)) * 0x1p-24f; }
constexpr float kElementwiseTolerance = 8 * 0x1p-24f;
// Of one of attention's weights rounded to bf16 the other way, beside values of up to 4.
constexpr float kRoundedTolerance = 4 * 0x1p-8f;

// The widths that exercise full vectors, tails and both.
constexpr int64_t kWidths[] = {1, 3, 8, 15, 16, 17, 31, 33, 64, 100, 131, 640, 1027};

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

struct AttentionCase {
  int64_t heads, kv_heads, head_dim, value_dim;
  DType dtype;
  int32_t window;
  float soft_cap;
};

// What a sequence's query sees is its last tokens; the cache's unused slots hold NaN.
void check_attention_case(Checker& check, const AttentionCase& c, int64_t block_size) {
  const std::vector<int32_t> kv_lens{1, 150, 64, 65, c.head_dim == 64 ? 1100 : 0x81};
  const std::vector<int32_t> counts{1, c.head_dim < 32 ? 90 : 20, 1, 3, 2};
  const int64_t longest = std::max(kv_lens[1], kv_lens[4]);
  const int64_t max_blocks = (longest + block_size - 1) / block_size;
  const int64_t num_blocks = max_blocks * static_cast<int64_t>(kv_lens.size());
  // The cache's content depends on sequence, position and head alone, not on the block size.
  std::vector<int32_t> tables;
  for (int64_t i = 0; i < num_blocks; ++i)
    tables.push_back(static_cast<int32_t>(num_blocks - 1 - i));
  for (size_t i = 1; i + 2 < tables.size(); i += 3) std::swap(tables[i], tables[i + 1]);
  const KeyLayout layout =
      check.isas.front().backend->key_layout(block_size, c.head_dim, c.value_dim, c.dtype);
  const auto part_of = [&](void* data, int64_t width) {
    return cache_part(data, c.dtype, num_blocks, c.kv_heads, block_size, width);
  };
  PagedKvCache cache{part_of(nullptr, c.head_dim), part_of(nullptr, c.value_dim), layout};
  // put(block, head, offset, row) for every row that a sequence has.
  const auto for_each_row = [&](int64_t width, uint64_t seed, auto put) {
    for (size_t b = 0; b < kv_lens.size(); ++b) {
      const Floats rows = normal(kv_lens[b] * c.kv_heads * width, mix64(seed, b));
      for (int64_t i = 0; i < kv_lens[b] * c.kv_heads; ++i) {
        const int64_t j = i / c.kv_heads;
        const int64_t block =
            tables[b * static_cast<size_t>(max_blocks) + static_cast<size_t>(j / block_size)];
        put(block, i % c.kv_heads, j % block_size, rows.begin() + i * width);
      }
    }
  };
  const auto fill = [&](int64_t width, bool is_key, uint64_t seed) {
    Floats part(num_blocks * c.kv_heads * block_size * width, kNan);
    for_each_row(width, seed, [&](int64_t block, int64_t head, int64_t offset, const float* row) {
      const int64_t begin = ((block * c.kv_heads + head) * block_size + offset) * width;
      for (int64_t d = 0; d < width; ++d)
        part[is_key ? cache.key_index(block, head, offset, d) : begin + d] = row[d];
    });
    return part;
  };
  const auto fill_fp8 = [&](int64_t width, bool is_key, uint64_t seed) {
    Array<uint8_t> bytes(num_blocks * cache_block_bytes(part_of(nullptr, width)), 0xff);  // NaN
    PagedKvCache to = cache;
    (is_key ? to.keys : to.values).data = bytes.begin();
    const auto store = is_key ? store_fp8_key : store_fp8_value;
    for_each_row(width, seed, [&](int64_t block, int64_t head, int64_t offset, const float* row) {
      store(to, block, head, offset, row);
    });
    return bytes;
  };
  const bool is_fp8 = c.dtype == DType::kF8E4M3;
  const Floats keys = is_fp8 ? Floats(0) : fill(c.head_dim, true, 14);
  const Floats values = is_fp8 ? Floats(0) : fill(c.value_dim, false, 15);
  const Array<uint16_t> keys_16 = to_16_bits(keys, DType::kBF16);
  const Array<uint16_t> values_16 = to_16_bits(values, DType::kBF16);
  const Array<uint8_t> keys_8 = is_fp8 ? fill_fp8(c.head_dim, true, 14) : Array<uint8_t>(0);
  const Array<uint8_t> values_8 = is_fp8 ? fill_fp8(c.value_dim, false, 15) : Array<uint8_t>(0);
  const auto data_of = [&](const Floats& f32, const Array<uint16_t>& bf16,
                           const Array<uint8_t>& fp8) -> void* {
    if (c.dtype == DType::kF32) return f32.begin();
    return is_fp8 ? static_cast<void*>(fp8.begin()) : bf16.begin();
  };
  cache.keys.data = data_of(keys, keys_16, keys_8);
  cache.values.data = data_of(values, values_16, values_8);
  std::vector<int32_t> starts{0};
  for (const int32_t count : counts) starts.push_back(starts.back() + count);
  const int64_t tokens = starts.back();
  const int64_t q_stride = c.heads * c.head_dim + 9;
  const int64_t out_stride = c.heads * c.value_dim + 3;
  const Floats q = normal(tokens * q_stride - 9, 16);
  // Tokens [token, token + count) of the given sequences.
  const auto run = [&](Backend& backend, int64_t token, std::span<const int32_t> query_starts,
                       std::span<const int32_t> lens, std::span<const int32_t> block_tables) {
    const int64_t count = query_starts.back();
    Floats out(count * out_stride - 3, 7.0f);
    Tensor q_view(q.begin() + token * q_stride, DType::kF32, {count, c.heads, c.head_dim});
    Tensor out_view(out.begin(), DType::kF32, {count, c.heads, c.value_dim});
    q_view.strides[0] = q_stride;
    out_view.strides[0] = out_stride;
    backend.paged_attention({.q = q_view,
                             .cache = cache,
                             .query_starts = query_starts,
                             .kv_lens = lens,
                             .block_tables = block_tables,
                             .max_blocks = max_blocks,
                             .scale = 1 / std::sqrt(static_cast<float>(c.head_dim)),
                             .window = c.window,
                             .soft_cap = c.soft_cap,
                             .out = out_view});
    return out;
  };
  const std::string what =
      concat("attention ", name(c.dtype), " H ", c.heads, "/", c.kv_heads, " D ", c.head_dim, "/",
             c.value_dim, " window ", c.window, " cap ", c.soft_cap, " P ", block_size,
             layout == KeyLayout::kPanels ? " panels" : "");
  const auto batch = [&](Backend& backend) { return run(backend, 0, starts, kv_lens, tables); };
  const Floats plain = batch(*check.ref);
  // Each token as a decode step of its own.
  for (const Isa& isa : check.isas) {
    const Floats all = batch(*isa.backend);
    const bool is_rounded = c.dtype != DType::kF32 && isa.has_bf16_products();
    // A sum whose last bit is not the manual's may turn the rounding of a probability.
    const float tolerance =
        sum_tolerance(512) + (is_rounded && !check.is_exact ? kRoundedTolerance : 0.0f);
    check.close(
        concat(isa.name, " ", what), all, is_rounded ? batch(*isa.ref) : plain,
        [&](int64_t i) { return i % out_stride < c.heads * c.value_dim ? tolerance : -1.0f; });
    Floats alone = all;
    for (size_t b = 0; b < kv_lens.size(); ++b) {
      const std::span<const int32_t> table(tables.data() + static_cast<int64_t>(b) * max_blocks,
                                           static_cast<size_t>(max_blocks));
      for (int32_t i = 0; i < counts[b]; i += i % 11 == 10 ? 1 : 5) {
        const int32_t lens[] = {kv_lens[b] - counts[b] + i + 1};
        const int32_t one[] = {0, 1};
        const Floats row = run(*isa.backend, starts[b] + i, one, lens, table);
        std::copy(row.begin(), row.end(), alone.begin() + (starts[b] + i) * out_stride);
      }
    }
    check.equal(concat(isa.name, " tokens alone, ", what), alone, all);
  }
}

void check_attention(Checker& check) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    check_attention_case(check, {4, 2, 8, 5, dtype, 0, 0.0f}, 7);
    check_attention_case(check, {2, 2, 20, 33, dtype, 70, 0.0f}, 16);
    check_attention_case(check, {5, 1, 24, 24, dtype, 1, 3.0f}, 1);
    check_attention_case(check, {2, 1, 64, 64, dtype, 0, 3.0f}, 16);
    check_attention_case(check, {2, 1, 80, 80, dtype, 70, 30.0f}, 32);
    check_attention_case(check, {2, 1, 128, 128, dtype, 0, 0.0f}, 48);
  }
  check_attention_case(check, {4, 2, 20, 36, DType::kF8E4M3, 70, 0.0f}, 7);
  check_attention_case(check, {2, 1, 64, 64, DType::kF8E4M3, 0, 3.0f}, 16);
  check_attention_case(check, {2, 2, 80, 80, DType::kF8E4M3, 0, 0.0f}, 32);
  check_attention_case(check, {2, 1, 128, 128, DType::kF8E4M3, 0, 0.0f}, 128);
  check_attention_case(check, {8, 1, 80, 80, DType::kF8E4M3, 69, 0.0f}, 16);
}

// fused_mlp over rows of K = 48 and a middle of `width`, bit for bit what its ops give.
void check_fused_mlp(Checker& check, DType dtype, int64_t rows, int64_t width) {
  const int64_t k = 48, n = 20;
  const Floats x = normal(rows * k, 21), norm = normal(k, 22);
  const Floats up = normal(2 * width * k, 23), down = normal(n * width, 24);
  for (const Isa& isa : check.isas) {
    Backend& backend = *isa.backend;
    const ConstTensor up_rows = matrix(up, 2 * width, k, k);
    const ConstTensor down_rows = matrix(down, n, width, width);
    const LinearWeight up_weight = backend.pack_linear({&up_rows, 1}, dtype);
    const LinearWeight down_weight = backend.pack_linear({&down_rows, 1}, dtype);
    const auto run = [&](bool is_fused) {
      const Floats normed(rows * k), gate_up(rows * 2 * width), gated(rows * width);
      const Floats out = normal(rows * n, 25);
      const FusedMlpArgs args{
          .up = {.norm = RmsNormArgs{.x = matrix(x, rows, k, k),
                                     .weight = vector(norm),
                                     .out = matrix(normed, rows, k, k)},
                 .linear = {.x = matrix(normed, rows, k, k),
                            .weight = &up_weight,
                            .out = matrix(gate_up, rows, 2 * width, 2 * width)},
                 .gate = GatedActivationArgs{.gate_up = matrix(gate_up, rows, 2 * width, 2 * width),
                                             .out = matrix(gated, rows, width, width)}},
          .down = {.x = matrix(gated, rows, width, width),
                   .weight = &down_weight,
                   .out = matrix(out, rows, n, n),
                   .accumulate = true}};
      if (is_fused) {
        backend.fused_mlp(args);
      } else {
        backend.rms_norm(*args.up.norm);
        backend.linear(args.up.linear);
        backend.gated_activation(*args.up.gate);
        backend.linear(args.down);
      }
      return out;
    };
    check.equal(concat(isa.name, " fused_mlp ", name(dtype), " M ", rows, " F ", width), run(true),
                run(false));
  }
}

// prepare_qkv as the ops that it stands for.
void prepare_one_by_one(Backend& backend, const PrepareQkvArgs& args) {
  const auto prepare = [&](const Tensor& heads, const ConstTensor& norm,
                           const ConstTensor& angles) {
    backend.rms_norm({.x = heads, .weight = norm, .out = heads, .numbers = args.numbers});
    backend.rotary({.heads = heads, .cos_sin = angles, .interleaved = args.interleaved});
  };
  prepare(args.q, args.q_norm, args.q_cos_sin);
  prepare(args.k, args.k_norm, args.k_cos_sin);
  backend.store_kv({.keys = args.k, .values = args.v, .slots = args.slots, .cache = args.cache});
}

// fused_attention, and prepare_qkv before it, of the last `num_queries` of 700 tokens: likewise.
void check_fused_attention(Checker& check, DType dtype, int64_t num_queries) {
  const int64_t heads = 2, dim = 32, block_size = 16, length = 700, n = 20;
  const int64_t num_blocks = (length + block_size - 1) / block_size;
  const int64_t width = (heads + 2) * dim;
  const Floats first = normal(length * width, 26), output = normal(n * heads * dim, 27);
  const Floats norms = normal(dim, 28), angles = normal(length * dim, 29);
  std::vector<int32_t> table(static_cast<size_t>(num_blocks));
  std::vector<int64_t> slots(static_cast<size_t>(length));
  std::iota(table.begin(), table.end(), 0);
  std::iota(slots.begin(), slots.end(), 0);
  const std::vector<int32_t> starts{0, static_cast<int32_t>(num_queries)};
  const std::vector<int32_t> lens{static_cast<int32_t>(length)};
  for (const Isa& isa : check.isas) {
    Backend& backend = *isa.backend;
    const ConstTensor output_rows = matrix(output, n, heads * dim, heads * dim);
    const LinearWeight weight = backend.pack_linear({&output_rows, 1}, DType::kBF16);
    const auto run = [&](bool is_fused) {
      const Floats qkv = first;
      const Array<std::byte> cache(2 * num_blocks * block_size * cache_row_bytes(dtype, dim));
      const auto part = [&](std::byte* data) {
        return cache_part(data, dtype, num_blocks, 1, block_size, dim);
      };
      const PagedKvCache kv{.keys = part(cache.begin()),
                            .values = part(cache.begin() + cache.size() / 2),
                            .key_layout = backend.key_layout(block_size, dim, dim, dtype)};
      const auto view = [&](int64_t begin, int64_t count) {
        Tensor heads_of(qkv.begin() + begin * dim, DType::kF32, {length, count, dim});
        heads_of.strides[0] = width;
        return heads_of;
      };
      const Tensor cos_sin = matrix(angles, length, dim, dim);
      const PrepareQkvArgs prepare{.q = view(0, heads),
                                   .k = view(heads, 1),
                                   .v = view(heads + 1, 1),
                                   .q_norm = vector(norms),
                                   .k_norm = vector(norms),
                                   .q_cos_sin = cos_sin,
                                   .k_cos_sin = cos_sin,
                                   .slots = slots,
                                   .cache = kv};
      const Floats attended(num_queries * heads * dim), out(num_queries * n);
      const FusedAttentionArgs args{
          .attention = {.q = prepare.q.slice(0, length - num_queries, num_queries),
                        .cache = kv,
                        .query_starts = starts,
                        .kv_lens = lens,
                        .block_tables = table,
                        .max_blocks = num_blocks,
                        .scale = 0.2f,
                        .out = Tensor(attended.begin(), DType::kF32, {num_queries, heads, dim})},
          .output = {.x = matrix(attended, num_queries, heads * dim, heads * dim),
                     .weight = &weight,
                     .out = matrix(out, num_queries, n, n)}};
      if (is_fused) {
        backend.prepare_qkv(prepare);
        backend.fused_attention(args);
      } else {
        prepare_one_by_one(backend, prepare);
        backend.paged_attention(args.attention);
        backend.linear(args.output);
      }
      return out;
    };
    check.equal(concat(isa.name, " fused_attention ", name(dtype), " M ", num_queries), run(true),
                run(false));
  }
}

void check_fused(Checker& check) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int64_t rows : {1, 5, 20})
      for (const int64_t width : {32, 96, 112}) check_fused_mlp(check, dtype, rows, width);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3})
    for (const int64_t num_queries : {1, 30}) check_fused_attention(check, dtype, num_queries);
}

// Rows of three weights, one of which is idle, beside linear over each row alone.
void check_grouped_linear_case(Checker& check, DType dtype, int64_t k) {
  const int64_t n = 37;
  const int64_t tokens = 5;
  const std::vector<int32_t> ids{2, 0, 2, 0, 0, 2, 2};
  const std::vector<int32_t> x_rows{4, 0, 1, 1, 3, 0, 2};
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
                                 .weight_ids = ids,
                                 .x_rows = x_rows,
                                 .out = matrix(out, rows, n, n)});
    for (int64_t r = 0; r < rows; ++r) {
      const size_t i = static_cast<size_t>(r);
      isa.backend->linear({.x = matrix(x, tokens, k, k).slice(0, x_rows[i], 1),
                           .weight = pointers[static_cast<size_t>(ids[i])],
                           .out = matrix(alone, rows, n, n).slice(0, r, 1)});
    }
    check.equal(concat(isa.name, " grouped_linear ", name(dtype), " K ", k), out, alone);
  }
}

void check_grouped_linear(Checker& check) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int64_t k : {17, 64, 640}) check_grouped_linear_case(check, dtype, k);
}

void check_sampling_case(Checker& check, int64_t vocabulary, bool has_ties) {
  const std::vector<int32_t> banned{0, static_cast<int32_t>(vocabulary / 2), -3, 1 << 30};
  const std::vector<TokenBias> biases{{0, 3.5f}, {static_cast<int32_t>(vocabulary - 1), -2.0f}};
  const std::vector<TokenCount> counts{{static_cast<int32_t>(vocabulary / 3), 2, true},
                                       {static_cast<int32_t>(vocabulary - 1), 0, true}};
  std::vector<uint32_t> allowed(static_cast<size_t>((vocabulary + 31) / 32), 0xa5a5a5a5u);
  if (allowed.size() > 2) allowed[1] = 0xffffffffu;
  const std::vector<int32_t> reported{static_cast<int32_t>(vocabulary / 2), 0};
  std::vector<SampleRow> rows;
  for (const float temperature : {0.0f, 0.7f, 1.0f, 3.0f}) {
    for (int filter = 0; filter < 6; ++filter) {
      SampleRow row;
      row.draw.temperature = temperature;
      row.seed = mix64(rows.size());
      row.position = filter % 2 == 0 ? 3 : 5'000'000'000;
      row.num_top = std::max(-1, filter - 2);
      if (filter == 1 || filter == 5) row.draw.top_k = 4;
      if (filter == 2 || filter == 5) row.draw.top_p = 0.8f;
      if (filter == 3 || filter == 5) row.draw.min_p = 0.05f;
      if (filter == 4 || filter == 5) row.banned_token_ids = banned;
      if (filter == 2 || filter == 4) row.allowed = allowed;
      if (filter == 1 || filter == 4) row.biases = biases;
      if (filter == 3 || filter == 4) row.counts = counts;
      row.draw.repetition_penalty = 1.5f;
      row.draw.frequency_penalty = 0.25f;
      row.draw.presence_penalty = -0.5f;
      row.reported_token_ids = reported;
      rows.push_back(row);
    }
  }
  const int64_t count = static_cast<int64_t>(rows.size());
  const int64_t stride = vocabulary + 1;
  const Floats logits = normal(count * stride - 1, 17);
  for (float& x : logits) x = has_ties ? std::floor(x * 3) : x * 3;
  logits[stride * 20] = -kInf;
  logits[stride * 21 + vocabulary - 1] = kNan;
  logits[stride * 22 + vocabulary / 2] = kInf;
  std::fill_n(logits.begin() + stride * 23, vocabulary, -kInf);
  const auto run = [&](Backend& backend, int64_t row, int64_t num_rows) {
    std::vector<SampledRow> out(static_cast<size_t>(num_rows));
    backend.sample(
        {.logits = matrix(logits, count, vocabulary, stride).slice(0, row, num_rows),
         .rows = std::span(rows).subspan(static_cast<size_t>(row), static_cast<size_t>(num_rows)),
         .out = out});
    return out;
  };
  const auto near = [](float a, float b) {
    return a == b || std::fabs(a - b) <= 2e-6f * std::max(1.0f, std::fabs(b));  // both may be -inf
  };
  const auto agree = [&](const SampledRow& a, const SampledRow& b) {
    bool same = a.is_valid == b.is_valid;
    if (!same || !b.is_valid) return same;
    same = a.token_id == b.token_id && a.rank == b.rank && near(a.logprob, b.logprob) &&
           a.top.size() == b.top.size() && a.reported.size() == b.reported.size();
    const auto agree_on = [&](const TopToken& x, const TopToken& y) {
      return x.token_id == y.token_id && x.rank == y.rank && near(x.logprob, y.logprob);
    };
    return same && std::ranges::equal(a.top, b.top, agree_on) &&
           std::ranges::equal(a.reported, b.reported, agree_on);
  };
  const std::vector<SampledRow> want = run(*check.ref, 0, count);
  for (const Isa& isa : check.isas) {
    const std::vector<SampledRow> all = run(*isa.backend, 0, count);
    for (int64_t r = 0; r < count; ++r) {
      const size_t i = static_cast<size_t>(r);
      const std::string what =
          concat(isa.name, " sample V ", vocabulary, has_ties ? " ties" : "", " row ", r);
      check.report(agree(all[i], want[i]),
                   concat(what, ": token ", all[i].token_id, ", expected ", want[i].token_id));
      const SampledRow alone = run(*isa.backend, r, 1)[0];
      check.report(agree(alone, all[i]) && (!alone.is_valid || alone.logprob == all[i].logprob),
                   concat(what, " alone"));
    }
  }
}

void check_sampling(Checker& check) {
  for (const int64_t vocabulary : {1, 2, 5, 17, 63, 64, 65, 130, 1000, 4099})
    for (const bool has_ties : {false, true}) check_sampling_case(check, vocabulary, has_ties);
}

constexpr struct {
  const char* name;
  void (*check)(Checker&);
} kFamilies[] = {
    {"rms_norm, add_rms_norm", &check_norms},
    {"gated_activation", &check_activations},
    {"rotary_table, rotary", &check_rotary},
    {"embedding, gather_rows, store_kv, copy_blocks", &check_rows_and_cache},
    {"first_non_finite", &check_first_non_finite},
    {"pack_linear, linear", &check_linear},
    {"pack_quantized, linear", &check_quantized},
    {"grouped_linear", &check_grouped_linear},
    {"paged_attention", &check_attention},
    {"fused_mlp, prepare_qkv, fused_attention", &check_fused},
    {"sample", &check_sampling},
};

int run(int argc, char** argv) {
  int num_threads = 1;
  std::vector<std::string> wanted;
  Checker check;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--threads" && i + 1 < argc)
      num_threads = std::atoi(argv[++i]);
    else if (std::string(argv[i]) == "--exact")
      check.is_exact = true;
    else
      wanted.push_back(argv[i]);
  }
  for (const CpuIsa& isa : cpu_isa_registry()) {
    const std::string name(isa.name);
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), name) == wanted.end()) continue;
    if (isa.can_run()) {
      check.isas.push_back(
          {.name = name,
           .backend = make_backend("cpu", {.num_threads = num_threads, .isa = name}),
           .ref = make_backend("ref", {.isa = name})});
      std::printf("%s: %s\n", name.c_str(), check.isas.back().backend->description().c_str());
    } else {
      std::printf("%s: this machine cannot run it\n", name.c_str());
    }
  }
  if (check.isas.empty() || (!wanted.empty() && check.isas.size() != wanted.size())) {
    std::printf("not every instruction set asked for can run\n");
    return 2;
  }
  for (const auto& family : kFamilies) {
    const int passed = check.passed;
    const int failed = check.failed;
    family.check(check);
    std::printf("%s: %d passed, %d failed\n", family.name, check.passed - passed,
                check.failed - failed);
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", check.passed, check.failed);
  return check.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace llmserve::isa_check

int main(int argc, char** argv) {
  try {
    return llmserve::isa_check::run(argc, argv);
  } catch (const std::exception& error) {
    std::printf("stopped: %s\n", error.what());
    return 2;
  }
}
