// Paged attention over every cache, and fused attention and MLP beside their compositions.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "checker.h"
#include "checks.h"
#include "kernels/host_ops.h"

namespace llmserve::isa_check {

namespace {

// Of one of attention's weights rounded to bf16 the other way, beside values of up to 4.
constexpr float kRoundedTolerance = 4 * 0x1p-8f;

struct AttentionCase {
  int64_t heads, kv_heads, head_dim, value_dim;
  DType dtype;
  int32_t window;
  float soft_cap;
  bool has_values_in_keys = false;
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
  const KeyLayout layout = c.has_values_in_keys ? KeyLayout::kRows
                                                : check.isas.front().backend->key_layout(
                                                      block_size, c.head_dim, c.value_dim, c.dtype);
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
  if (c.has_values_in_keys) cache.values = cache.keys.slice(3, 0, c.value_dim);
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
  const std::string what = concat(
      "attention ", name(c.dtype), " H ", c.heads, "/", c.kv_heads, " D ", c.head_dim, "/",
      c.value_dim, " window ", c.window, " cap ", c.soft_cap, " P ", block_size,
      layout == KeyLayout::kPanels ? " panels" : "", c.has_values_in_keys ? " values in keys" : "");
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

}  // namespace

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
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    check_attention_case(check, {5, 1, 80, 64, dtype, 0, 0.0f, true}, 16);
    check_attention_case(check, {18, 1, 28, 20, dtype, 70, 3.0f, true}, 7);
  }
}

namespace {

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

}  // namespace

void check_fused(Checker& check) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int64_t rows : {1, 5, 20})
      for (const int64_t width : {32, 96, 112}) check_fused_mlp(check, dtype, rows, width);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3})
    for (const int64_t num_queries : {1, 30}) check_fused_attention(check, dtype, num_queries);
}

}  // namespace llmserve::isa_check
