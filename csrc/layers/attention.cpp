#include "layers/attention.h"

namespace llmserve {
namespace {

// Columns [begin, begin + num_heads * head_dim) of rows [T, W], seen as [T, num_heads, head_dim].
Tensor head_view(const Tensor& rows, int64_t begin, int64_t num_heads, int64_t head_dim) {
  return as_heads(rows.slice(1, begin, num_heads * head_dim), num_heads);
}

// Queries, keys, values, from wherever they are.
std::vector<WeightPart> qkv_parts(const TensorNames& names, const std::string& prefix,
                                  const AttentionSpec& spec) {
  const int64_t q_width = spec.num_heads * spec.head_dim;
  const int64_t kv_width = spec.num_kv_heads * spec.head_dim;
  if (names.qkv.empty())
    return {
        {prefix + names.q, q_width}, {prefix + names.k, kv_width}, {prefix + names.v, kv_width}};
  const int64_t all = q_width + 2 * kv_width;
  const std::string name = prefix + names.qkv;
  if (!spec.is_qkv_by_group) return {{name, all}};
  const int64_t queries = q_width / spec.num_kv_heads;  // of a group
  const int64_t stride = queries + 2 * spec.head_dim;
  const int64_t begins[] = {0, queries, queries + spec.head_dim};
  const int64_t sizes[] = {queries, spec.head_dim, spec.head_dim};
  std::vector<WeightPart> parts;
  for (int i = 0; i < 3; ++i)
    parts.push_back({.name = name,
                     .size = sizes[i],
                     .begin = begins[i],
                     .of = all,
                     .num_runs = spec.num_kv_heads,
                     .stride = stride});
  return parts;
}

}  // namespace

Attention::Attention(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
                     const AttentionSpec& spec)
    : spec_(spec),
      qkv_(weights, WeightGroup::kAttention, qkv_parts(names, prefix, spec), spec.hidden_size,
           {.has_bias = spec.qkv_bias, .is_transposed = spec.is_transposed}),
      output_(weights, WeightGroup::kAttention,
              {{prefix + names.attention_output, spec.hidden_size}}, spec.num_heads * spec.head_dim,
              {.has_bias = spec.output_bias, .is_transposed = spec.is_transposed}) {
  if (spec.qk_norm != QkNorm::kNone) {
    q_norm_.emplace(weights, prefix + names.q_norm, spec.num_heads, spec.head_dim, spec.qk_norm,
                    spec.norm);
    k_norm_.emplace(weights, prefix + names.k_norm, spec.num_kv_heads, spec.head_dim, spec.qk_norm,
                    spec.norm);
  }
  if (spec.has_sinks)
    sinks_ = weights.vector(WeightGroup::kAttention, prefix + names.sinks, spec.num_heads);
}

void Attention::forward(const ForwardContext& context, const LinearInput& x,
                        const RotaryTables& angles, const PagedKvCache& cache,
                        const Output& to) const {
  const Arena::Scope scope(context.arena);
  const ModelInput& input = context.input;
  const int64_t num_tokens = input.num_tokens();
  const Tensor qkv = context.arena.allocate(DType::kF32, {num_tokens, qkv_.out_features()});
  qkv_.forward(context, x, qkv);
  prepare(context, qkv, angles, cache);

  const KvGroupInput& group = input.kv_groups[static_cast<size_t>(spec_.kv_group)];
  const Tensor attended =
      context.arena.allocate(DType::kF32, {num_tokens, spec_.num_heads * spec_.head_dim});
  const PagedAttentionArgs args{.q = head_view(qkv, 0, spec_.num_heads, spec_.head_dim),
                                .cache = cache,
                                .query_starts = input.query_starts,
                                .kv_lens = input.kv_lens,
                                .block_tables = group.block_tables,
                                .max_blocks = input.max_blocks,
                                .scale = spec_.scale,
                                .window = spec_.window,
                                .soft_cap = spec_.soft_cap,
                                .sinks = sinks_.view(),
                                .out = head_view(attended, 0, spec_.num_heads, spec_.head_dim)};
  if (const auto output = output_.as_one(context, attended, to.out, to.accumulate))
    return context.backend.fused_attention({.attention = args, .output = *output});
  context.backend.paged_attention(args);
  output_.forward(context, {attended}, to.out, to.accumulate);
}

void Attention::prepare(const ForwardContext& context, const Tensor& qkv,
                        const RotaryTables& angles, const PagedKvCache& cache) const {
  const int64_t q_width = spec_.num_heads * spec_.head_dim;
  const int64_t kv_width = spec_.num_kv_heads * spec_.head_dim;
  PrepareQkvArgs args{.q = head_view(qkv, 0, spec_.num_heads, spec_.head_dim),
                      .k = head_view(qkv, q_width, spec_.num_kv_heads, spec_.head_dim),
                      .v = head_view(qkv, q_width + kv_width, spec_.num_kv_heads, spec_.head_dim),
                      .q_cos_sin = angles.queries,
                      .k_cos_sin = angles.keys,
                      .interleaved = spec_.is_interleaved,
                      .slots = context.input.kv_groups[static_cast<size_t>(spec_.kv_group)].slots,
                      .cache = cache};
  if (spec_.has_norm_after_rope) rotate(context, args);
  if (q_norm_ && spec_.qk_norm == QkNorm::kHead && spec_.norm.kind == NormKind::kRms) {
    args.q_norm = q_norm_->weight();
    args.k_norm = k_norm_->weight();
    args.numbers = spec_.norm.numbers;
  } else if (q_norm_) {
    q_norm_->forward(context, args.q);
    k_norm_->forward(context, args.k);
  }
  context.backend.prepare_qkv(args);
}

void Attention::rotate(const ForwardContext& context, PrepareQkvArgs& args) const {
  if (!args.q_cos_sin) return;
  context.backend.rotary(
      {.heads = args.q, .cos_sin = args.q_cos_sin, .interleaved = args.interleaved});
  context.backend.rotary(
      {.heads = args.k, .cos_sin = args.k_cos_sin, .interleaved = args.interleaved});
  args.q_cos_sin = args.k_cos_sin = {};
}

int64_t Attention::workspace_bytes(int64_t num_tokens) const {
  return Arena::footprint_bytes(DType::kF32, {num_tokens, qkv_.out_features()}) +
         Arena::footprint_bytes(DType::kF32, {num_tokens, spec_.num_heads * spec_.head_dim});
}

}  // namespace llmserve
