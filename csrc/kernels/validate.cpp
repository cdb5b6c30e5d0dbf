#include <array>
#include <cmath>
#include <iterator>
#include <string>

#include "core/error.h"
#include "core/shape_check.h"
#include "kernels/ops.h"

namespace llmserve {
namespace {

[[noreturn]] void refuse(std::string_view field, const std::string& problem) {
  throw InvalidArgument(concat(field, ": ", problem));
}

void check_length(std::string_view field, size_t got, int64_t expected) {
  if (static_cast<int64_t>(got) != expected)
    refuse(field, concat("expected ", expected, " entries, got ", got));
}

template <class Void>
void check_contiguous(std::string_view field, const BasicTensor<Void>& tensor) {
  if (!tensor.is_contiguous()) refuse(field, concat("expected contiguous, got ", describe(tensor)));
}

// Every index in [begin, end).
template <class Int>
void check_indices(std::string_view field, std::span<const Int> indices, int64_t begin,
                   int64_t end) {
  for (size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] < begin || indices[i] >= end) {
      refuse(field,
             concat("expected indices in [", begin, ", ", end, "), got ", indices[i], " at ", i));
    }
  }
}

bool is_aligned(const Tensor& part) {
  return reinterpret_cast<uintptr_t>(part.data) % kCacheScaleBytes == 0;
}

bool is_laid_out(const Tensor& part) {
  const auto& [num_blocks, num_heads, block_size, width] = part.shape;
  const Tensor expected =
      cache_part(part.data, part.dtype, num_blocks, num_heads, block_size, width);
  for (int d = 0; d < part.rank; ++d)
    if (part.shape[d] != 1 && part.strides[d] != expected.strides[d]) return false;
  return true;
}

void check_cache(std::string_view op, const PagedKvCache& cache, int64_t kv_heads, int64_t key_dim,
                 int64_t value_dim) {
  const std::string keys = concat(op, ".cache.keys");
  check_tensor(keys, cache.keys, {{"N"}, {"K", kv_heads}, {"P"}, {"D", key_dim}},
               {DType::kF32, DType::kBF16, DType::kF8E4M3});
  check_tensor(
      concat(op, ".cache.values"), cache.values,
      {{"N", cache.keys.shape[0]}, {"K", kv_heads}, {"P", cache.keys.shape[2]}, {"Dv", value_dim}},
      {cache.keys.dtype});
  if (cache.has_values_in_keys()) {
    if (cache.values.strides != cache.keys.strides || cache.values.shape[3] > cache.keys.shape[3])
      refuse(concat(op, ".cache.values"),
             "values in the keys are the first elements of their rows");
    if (cache.key_layout != KeyLayout::kRows) refuse(keys, "keys that values are in lie in rows");
  }
  if (!is_laid_out(cache.keys) || (!cache.has_values_in_keys() && !is_laid_out(cache.values)))
    refuse(keys, "keys and values must be contiguous");
  if (cache.keys.dtype == DType::kF8E4M3 &&
      (cache.keys.shape[3] % 4 != 0 || cache.values.shape[3] % 4 != 0 || !is_aligned(cache.keys) ||
       !is_aligned(cache.values)))
    refuse(keys, concat("8-bit floats take aligned rows of a multiple of 4 elements, got ",
                        describe(cache.keys), " and ", describe(cache.values)));
  if (cache.key_layout == KeyLayout::kPanels &&
      (cache.keys.shape[2] % kKeyPanelTokens != 0 ||
       (cache.keys.dtype == DType::kBF16 && cache.keys.shape[3] % 2 != 0)))
    refuse(keys, "panels take blocks of a multiple of 16 tokens and, in bf16, an even head size");
}

void check_norm(std::string_view op, const ConstTensor& weight, int64_t width,
                const NormNumbers& numbers) {
  check_tensor(concat(op, ".weight"), weight, {{"D", width}}, {DType::kF32});
  if (!(numbers.eps >= 0))
    refuse(concat(op, ".eps"), concat("expected a number >= 0, got ", numbers.eps));
}

void check_factor(std::string_view field, float value) {
  if (!std::isfinite(value)) refuse(field, concat("expected a finite number, got ", value));
}

void check_activation(std::string_view field, Activation activation) {
  if (static_cast<size_t>(activation) >= std::size(kActivations))
    refuse(field, concat("expected one of the activations, got ", static_cast<int>(activation)));
}

void check_sample_row(const SampleRow& row, int64_t vocabulary) {
  if (!(row.draw.temperature >= 0) || !std::isfinite(row.draw.temperature)) {
    refuse("sample.rows.temperature",
           concat("expected a finite number >= 0, got ", row.draw.temperature));
  }
  const float penalty = row.draw.repetition_penalty;
  if (!(penalty > 0) || !std::isfinite(penalty))
    refuse("sample.rows.repetition_penalty", concat("expected a finite number > 0, got ", penalty));
  if (row.draw_logits) {
    check_tensor("sample.rows.draw_logits", row.draw_logits, {{"V", vocabulary}}, {DType::kF32});
  }
  if (!row.allowed.empty())
    check_length("sample.rows.allowed", row.allowed.size(), (vocabulary + 31) / 32);
  const auto check_id = [&](const char* field, int32_t id) {
    if (id < 0 || id >= vocabulary)
      refuse(field, concat("expected token ids in [0, ", vocabulary, "), got ", id));
  };
  for (const TokenBias& bias : row.biases) check_id("sample.rows.biases", bias.token_id);
  for (const TokenCount& count : row.counts) check_id("sample.rows.counts", count.token_id);
  check_indices("sample.rows.reported_token_ids", row.reported_token_ids, 0, vocabulary);
  if (row.forced_token_id >= vocabulary)
    check_id("sample.rows.forced_token_id", row.forced_token_id);
}

}  // namespace

void validate(const EmbeddingArgs& args) {
  const int64_t num_tokens = static_cast<int64_t>(args.token_ids.size());
  if (args.blocks)
    check_tensor("embedding.table", args.table, {{"V"}, {"bytes of a row"}}, {DType::kU8});
  else
    check_tensor("embedding.table", args.table, {{"V"}, {"E"}},
                 {DType::kF32, DType::kBF16, DType::kF16});
  const int64_t width = args.table.shape[1];
  const int64_t num_elements =
      args.blocks ? width / args.blocks->block_bytes * args.blocks->block_elements : width;
  check_tensor("embedding.out", args.out, {{"T", num_tokens}, {"E", num_elements}}, {DType::kF32});
  check_indices("embedding.token_ids", args.token_ids, 0, args.table.shape[0]);
  for (const GivenRows& given : args.given) {
    if (given.begin < 0 || given.count < 0 || given.begin + given.count > num_tokens) {
      refuse("embedding.given", concat("expected rows of the ", num_tokens, " tokens, got ",
                                       given.count, " at ", given.begin));
    }
  }
}

void validate(const RmsNormArgs& args) {
  const std::array<int64_t, kMaxRank>& shape = args.x.shape;
  if (args.x.rank == 3) {
    check_tensor("rms_norm.x", args.x, {{"T"}, {"H"}, {"D"}}, {DType::kF32});
    check_tensor("rms_norm.out", args.out, {{"T", shape[0]}, {"H", shape[1]}, {"D", shape[2]}},
                 {DType::kF32});
  } else {
    check_tensor("rms_norm.x", args.x, {{"R"}, {"D"}}, {DType::kF32});
    check_tensor("rms_norm.out", args.out, {{"R", shape[0]}, {"D", shape[1]}}, {DType::kF32});
  }
  check_norm("rms_norm", args.weight, shape[args.x.rank - 1], args.numbers);
}

void validate(const AddRmsNormArgs& args) {
  check_tensor("add_rms_norm.residual", args.residual, {{"T"}, {"E"}}, {DType::kF32});
  const int64_t rows = args.residual.shape[0];
  const int64_t width = args.residual.shape[1];
  check_tensor("add_rms_norm.x", args.x, {{"T", rows}, {"E", width}}, {DType::kF32});
  check_tensor("add_rms_norm.out", args.out, {{"T", rows}, {"E", width}}, {DType::kF32});
  check_norm("add_rms_norm", args.weight, width, args.numbers);
}

void validate(const LayerNormArgs& args) {
  const int64_t width = args.x.shape[1];
  check_tensor("layer_norm.x", args.x, {{"R"}, {"D"}}, {DType::kF32});
  check_tensor("layer_norm.out", args.out, {{"R", args.x.shape[0]}, {"D", width}}, {DType::kF32});
  check_norm("layer_norm", args.weight, width, args.numbers);
  if (args.bias) check_tensor("layer_norm.bias", args.bias, {{"D", width}}, {DType::kF32});
}

void validate(const AddArgs& args) {
  check_tensor("add.out", args.out, {{"R"}, {"E"}}, {DType::kF32});
  check_tensor("add.x", args.x, {{"R", args.out.shape[0]}, {"E", args.out.shape[1]}},
               {DType::kF32});
  check_factor("add.scale", args.scale);
}

void validate(const LinearArgs& args) {
  if (args.weight == nullptr) refuse("linear.weight", "expected a packed weight, got none");
  check_tensor("linear.x", args.x, {{"M"}, {"K", args.weight->in_features}}, {DType::kF32});
  check_tensor("linear.out", args.out, {{"M", args.x.shape[0]}, {"N", args.weight->out_features}},
               {DType::kF32});
  if (args.bias)
    check_tensor("linear.bias", args.bias, {{"N", args.weight->out_features}}, {DType::kF32});
}

void validate(const GroupedLinearArgs& args) {
  if (args.weights.empty()) refuse("grouped_linear.weights", "expected at least one, got none");
  const LinearWeight* first = args.weights[0];
  for (const LinearWeight* weight : args.weights) {
    if (weight == nullptr) refuse("grouped_linear.weights", "expected packed weights, got none");
    if (weight->out_features != first->out_features || weight->in_features != first->in_features ||
        weight->dtype != first->dtype || weight->format != first->format)
      refuse("grouped_linear.weights", "expected weights of one shape, dtype and format");
  }
  check_tensor("grouped_linear.x", args.x, {{"T"}, {"K", first->in_features}}, {DType::kF32});
  check_tensor("grouped_linear.weight_ids", args.weight_ids, {{"R"}}, {DType::kI32});
  const int64_t rows = args.weight_ids.shape[0];
  check_contiguous("grouped_linear.weight_ids", args.weight_ids);
  const int64_t tokens = args.x.shape[0];
  if (tokens == 0 ? rows != 0 : rows % tokens != 0)
    refuse("grouped_linear.weight_ids",
           concat("expected a multiple of the ", tokens, " rows of x, got ", rows));
  check_tensor("grouped_linear.out", args.out, {{"R", rows}, {"N", first->out_features}},
               {DType::kF32});
  if (args.bias)
    check_tensor("grouped_linear.bias", args.bias,
                 {{"X", std::ssize(args.weights)}, {"N", first->out_features}}, {DType::kF32});
}

void validate(const RouteExpertsArgs& args) {
  check_tensor("route_experts.logits", args.logits, {{"T"}, {"X"}}, {DType::kF32});
  const int64_t tokens = args.logits.shape[0];
  const int64_t experts = args.logits.shape[1];
  check_tensor("route_experts.ids", args.ids, {{"T", tokens}, {"k"}}, {DType::kI32});
  const int64_t top_k = args.ids.shape[1];
  check_tensor("route_experts.weights", args.weights, {{"T", tokens}, {"k", top_k}}, {DType::kF32});
  check_contiguous("route_experts.ids", args.ids);
  check_contiguous("route_experts.weights", args.weights);
  for (const auto& [field, vector] : {std::pair("route_experts.choice_bias", args.choice_bias),
                                      std::pair("route_experts.expert_scales", args.expert_scales)})
    if (vector) check_tensor(field, vector, {{"X", experts}}, {DType::kF32});
  const RouterNumbers& numbers = args.numbers;
  check_factor("route_experts.scale", numbers.scale);
  if (numbers.num_groups < 1 || experts % numbers.num_groups != 0)
    refuse("route_experts.num_groups",
           concat("expected a divisor of X=", experts, ", got ", numbers.num_groups));
  const int64_t group = experts / numbers.num_groups;
  if (numbers.top_groups < 1 || numbers.top_groups > numbers.num_groups)
    refuse("route_experts.top_groups",
           concat("expected 1 to ", numbers.num_groups, ", got ", numbers.top_groups));
  if (numbers.group_top < 1 || numbers.group_top > 2 || numbers.group_top > group)
    refuse("route_experts.group_top",
           concat("expected 1 or 2 of a group of ", group, ", got ", numbers.group_top));
  if (top_k < 1 || top_k > numbers.top_groups * group)
    refuse("route_experts.ids",
           concat("expected 1 to ", numbers.top_groups * group, " experts a token, got ", top_k));
}

void validate(const CombineExpertsArgs& args) {
  check_tensor("combine_experts.weights", args.weights, {{"T"}, {"k"}}, {DType::kF32});
  check_contiguous("combine_experts.weights", args.weights);
  const int64_t tokens = args.weights.shape[0];
  check_tensor("combine_experts.x", args.x, {{"R", tokens * args.weights.shape[1]}, {"E"}},
               {DType::kF32});
  check_tensor("combine_experts.out", args.out, {{"T", tokens}, {"E", args.x.shape[1]}},
               {DType::kF32});
}

void validate(const RotaryTableArgs& args) {
  if (args.period < 1)
    refuse("rotary_table.period", concat("expected at least 1, got ", args.period));
  check_tensor("rotary_table.cos_sin", args.cos_sin,
               {{"T", static_cast<int64_t>(args.positions.size())},
                {"d", 2 * static_cast<int64_t>(args.inv_freq.size())}},
               {DType::kF32});
}

void validate(const RotaryArgs& args) {
  check_tensor("rotary.heads", args.heads, {{"T"}, {"H"}, {"D"}}, {DType::kF32});
  check_tensor("rotary.cos_sin", args.cos_sin, {{"T", args.heads.shape[0]}, {"d"}}, {DType::kF32});
  const int64_t width = args.cos_sin.shape[1];
  if (width % 2 != 0 || width > args.heads.shape[2]) {
    refuse("rotary.cos_sin",
           concat("expected an even width of at most D=", args.heads.shape[2], ", got ", width));
  }
  if (args.out)
    check_tensor(
        "rotary.out", args.out,
        {{"T", args.heads.shape[0]}, {"H", args.heads.shape[1]}, {"D", args.heads.shape[2]}},
        {DType::kF32});
}

void validate(const StoreKvArgs& args) {
  check_tensor("store_kv.keys", args.keys, {{"T"}, {"K"}, {"D"}}, {DType::kF32});
  const bool has_values = !args.cache.has_values_in_keys();
  if (has_values)
    check_tensor("store_kv.values", args.values,
                 {{"T", args.keys.shape[0]}, {"K", args.keys.shape[1]}, {"Dv"}}, {DType::kF32});
  else if (args.values)
    refuse("store_kv.values", "expected none beside a cache whose values are in its keys");
  check_cache("store_kv", args.cache, args.keys.shape[1], args.keys.shape[2],
              has_values ? args.values.shape[2] : -1);
  check_length("store_kv.slots", args.slots.size(), args.keys.shape[0]);
  check_indices("store_kv.slots", args.slots, -1,
                args.cache.keys.shape[0] * args.cache.keys.shape[2]);
}

void validate(const CopyBlocksArgs& args) {
  check_cache("copy_blocks", args.cache, -1, -1, -1);
  const int64_t num_blocks = args.cache.keys.shape[0];
  for (const auto& [source, destination] : args.pairs) {
    const int32_t both[] = {source, destination};
    check_indices<int32_t>("copy_blocks.pairs", both, 0, num_blocks);
  }
}

void validate(const TransferBlocksArgs& args) {
  const Tensor& keys = args.device.keys;
  check_cache("transfer_blocks.device", args.device, -1, -1, -1);
  check_cache("transfer_blocks.host", args.host, keys.shape[1], keys.shape[3],
              args.device.values.shape[3]);
  if (args.host.keys.shape[2] != keys.shape[2] || args.host.keys.dtype != keys.dtype ||
      args.host.key_layout != args.device.key_layout) {
    refuse("transfer_blocks.host",
           concat("expected blocks of ", keys.shape[2], " tokens in ", name(keys.dtype),
                  " like the device's, got ", describe(args.host.keys)));
  }
  const PagedKvCache& from = args.to_host ? args.device : args.host;
  const PagedKvCache& to = args.to_host ? args.host : args.device;
  for (const auto& [source, destination] : args.pairs) {
    check_indices<int32_t>("transfer_blocks.pairs (source)", {&source, 1}, 0, from.keys.shape[0]);
    check_indices<int32_t>("transfer_blocks.pairs (destination)", {&destination, 1}, 0,
                           to.keys.shape[0]);
  }
}

void validate(const PagedAttentionArgs& args) {
  check_tensor("paged_attention.q", args.q, {{"T"}, {"H"}, {"D"}}, {DType::kF32});
  const int64_t num_heads = args.q.shape[1];
  check_cache("paged_attention", args.cache, -1, args.q.shape[2], -1);
  const int64_t kv_heads = args.cache.keys.shape[1];
  if (num_heads == 0 || kv_heads == 0 || num_heads % kv_heads != 0) {
    refuse("paged_attention.q",
           concat("expected a multiple of the cache's ", kv_heads, " KV heads, got ", num_heads));
  }
  check_tensor("paged_attention.out", args.out,
               {{"T", args.q.shape[0]}, {"H", num_heads}, {"Dv", args.cache.values.shape[3]}},
               {DType::kF32});
  if (args.sinks)
    check_tensor("paged_attention.sinks", args.sinks, {{"H", num_heads}}, {DType::kF32});
  if (args.ranks != nullptr && kv_heads != 1)
    refuse("paged_attention.ranks",
           concat("expected one KV head where ranks keep the cache together, got ", kv_heads));
  const int64_t num_sequences = static_cast<int64_t>(args.kv_lens.size());
  check_length("paged_attention.query_starts", args.query_starts.size(), num_sequences + 1);
  check_length("paged_attention.block_tables", args.block_tables.size(),
               num_sequences * args.max_blocks);
  if (args.query_starts.front() != 0 || args.query_starts.back() != args.q.shape[0]) {
    refuse("paged_attention.query_starts",
           concat("expected to run from 0 to T=", args.q.shape[0], ", got ",
                  args.query_starts.front(), " to ", args.query_starts.back()));
  }
  const int64_t max_len = args.max_blocks * args.cache.keys.shape[2];
  for (int64_t b = 0; b < num_sequences; ++b) {
    const int64_t num_queries = args.query_starts[b + 1] - args.query_starts[b];
    if (num_queries < 0) refuse("paged_attention.query_starts", concat("decreases at ", b));
    if (args.kv_lens[b] < num_queries || args.kv_lens[b] > max_len) {
      refuse("paged_attention.kv_lens",
             concat("expected at least the sequence's ", num_queries,
                    " tokens and at most M*P=", max_len, ", got ", args.kv_lens[b], " at ", b));
    }
  }
}

void validate(const GatedActivationArgs& args) {
  check_tensor("gated_activation.out", args.out, {{"T"}, {"F"}}, {DType::kF32});
  check_tensor("gated_activation.gate_up", args.gate_up,
               {{"T", args.out.shape[0]}, {"2F", 2 * args.out.shape[1]}}, {DType::kF32});
  check_activation("gated_activation.activation", args.activation);
}

void validate(const ActivationArgs& args) {
  check_tensor("activation.x", args.x, {{"T"}, {"F"}}, {DType::kF32});
  check_tensor("activation.out", args.out, {{"T", args.x.shape[0]}, {"F", args.x.shape[1]}},
               {DType::kF32});
  check_activation("activation.activation", args.activation);
  if (kActivations[static_cast<size_t>(args.activation)].is_gated)
    refuse("activation.activation", concat("expected an activation of one number, got ",
                                           name(args.activation), "; use gated_activation"));
}

void validate(const CapLogitsArgs& args) {
  check_tensor("cap_logits.logits", args.logits, {{"S"}, {"V"}}, {DType::kF32});
  check_factor("cap_logits.scale", args.scale);
  check_factor("cap_logits.soft_cap", args.soft_cap);
  if (args.soft_cap < 0)
    refuse("cap_logits.soft_cap", concat("expected a number >= 0, got ", args.soft_cap));
}

void validate(const GatherRowsArgs& args) {
  check_tensor("gather_rows.x", args.x, {{"T"}, {"E"}}, {DType::kF32});
  check_tensor("gather_rows.out", args.out,
               {{"S", static_cast<int64_t>(args.rows.size())}, {"E", args.x.shape[1]}},
               {DType::kF32});
  check_indices("gather_rows.rows", args.rows, 0, args.x.shape[0]);
}

void validate(const SampleArgs& args) {
  check_tensor("sample.logits", args.logits, {{"S"}, {"V"}}, {DType::kF32});
  check_length("sample.rows", args.rows.size(), args.logits.shape[0]);
  check_length("sample.out", args.out.size(), args.logits.shape[0]);
  if (args.logits.shape[1] == 0) refuse("sample.logits", "expected a vocabulary, got V=0");
  for (const SampleRow& row : args.rows) check_sample_row(row, args.logits.shape[1]);
}

}  // namespace llmserve
