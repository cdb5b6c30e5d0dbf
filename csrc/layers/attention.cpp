#include "layers/attention.h"

namespace llmserve {
namespace {

// Columns [begin, begin + num_heads * head_dim) of rows [T, W], seen as [T, num_heads, head_dim].
Tensor head_view(const Tensor& rows, int64_t begin, int64_t num_heads, int64_t head_dim) {
  return as_heads(rows.slice(1, begin, num_heads * head_dim), num_heads);
}

// Queries, keys, values of a rank's heads, from wherever they are.
std::vector<WeightPart> qkv_parts(const TensorNames& names, const std::string& prefix,
                                  const AttentionSpec& spec, const HeadCut& cut) {
  const int64_t dim = spec.head_dim;
  const int64_t q_width = spec.num_heads * dim;
  const int64_t kv_width = spec.num_kv_heads * dim;
  const auto heads_of = [&](const std::string& name, int64_t begin, int64_t first, int64_t count,
                            int64_t of) {
    return WeightPart{
        .name = prefix + name, .size = count * dim, .begin = begin + first * dim, .of = of};
  };
  const auto queries_of = [&](const std::string& name, int64_t of) {
    return heads_of(name, 0, cut.first_head, cut.num_heads, of);
  };
  const auto kv_of = [&](const std::string& name, int64_t begin, int64_t of) {
    return heads_of(name, begin, cut.first_kv_head, cut.num_kv_heads, of);
  };
  if (names.qkv.empty())
    return {queries_of(names.q, q_width), kv_of(names.k, 0, kv_width), kv_of(names.v, 0, kv_width)};
  const int64_t all = q_width + 2 * kv_width;
  if (!spec.is_qkv_by_group)
    return {queries_of(names.qkv, all), kv_of(names.qkv, q_width, all),
            kv_of(names.qkv, q_width + kv_width, all)};
  const int64_t group = q_width / spec.num_kv_heads;  // queries of a KV head
  const int64_t stride = group + 2 * dim;
  const int64_t first = cut.first_kv_head * stride;
  const int64_t before = cut.first_head * dim - cut.first_kv_head * group;  // of its queries
  const int64_t begins[] = {first + before, first + group, first + group + dim};
  const int64_t sizes[] = {cut.num_heads / cut.num_kv_heads * dim, dim, dim};
  std::vector<WeightPart> parts;
  for (int i = 0; i < 3; ++i)
    parts.push_back({.name = prefix + names.qkv,
                     .size = sizes[i],
                     .begin = begins[i],
                     .of = all,
                     .num_runs = cut.num_kv_heads,
                     .stride = stride});
  return parts;
}

}  // namespace

Attention::Attention(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
                     const AttentionSpec& spec)
    : spec_(spec),
      cut_(weights.rank(), spec.num_heads, spec.num_kv_heads),
      context_(weights.rank(), spec.num_heads, spec.num_kv_heads),
      given_(weights.rank(), cut_.given, spec.head_dim),
      given_kv_(weights.rank(), cut_.given_kv, spec.head_dim),
      qkv_(weights, WeightGroup::kAttention, qkv_parts(names, prefix, spec, cut_),
           spec.input_size > 0 ? spec.input_size : spec.hidden_size,
           {.has_bias = spec.qkv_bias, .is_transposed = spec.is_transposed}),
      output_(weights, WeightGroup::kAttention,
              {.name = prefix + names.attention_output,
               .out_features = spec.hidden_size,
               .has_bias = spec.output_bias,
               .is_transposed = spec.is_transposed},
              head_input(weights.rank(), cut_, spec.head_dim)) {
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
  const PrepareQkvArgs prepare = to_prepare(context, qkv, angles, cache);

  const KvGroupInput& group = input.kv_groups[static_cast<size_t>(spec_.kv_group)];
  const OutputLinear::Input attended = output_.allocate_input(context, num_tokens);
  const ConstTensor sinks = sinks_.view();
  const PagedAttentionArgs args{
      .q = prepare.q,
      .cache = cache,
      .query_starts = input.query_starts,
      .kv_lens = input.kv_lens,
      .block_tables = group.block_tables,
      .max_blocks = input.max_blocks,
      .scale = spec_.scale,
      .window = spec_.window,
      .soft_cap = spec_.soft_cap,
      .sinks = sinks ? sinks.slice(0, cut_.first_head, cut_.num_heads) : sinks,
      .out = as_heads(attended.own, cut_.num_heads)};
  const OutputLinear::Target target = output_.begin(context, to.out, to.accumulate);
  const auto output =
      context_.is_shared() ? std::nullopt : output_.as_one(context, attended, target);
  if (output) {
    context.backend.fused_attention({.prepare = prepare, .attention = args, .output = *output});
  } else {
    context.backend.prepare_qkv(prepare);
    context_.attend(context, args);
    output_.run(context, attended, target);
  }
  output_.finish(context, target, to.out, to.accumulate);
}

PrepareQkvArgs Attention::to_prepare(const ForwardContext& context, const Tensor& qkv,
                                     const RotaryTables& angles, const PagedKvCache& cache) const {
  const int64_t q_width = cut_.num_heads * spec_.head_dim;
  const int64_t kv_width = cut_.num_kv_heads * spec_.head_dim;
  PrepareQkvArgs args{.q = head_view(qkv, 0, cut_.num_heads, spec_.head_dim),
                      .k = head_view(qkv, q_width, cut_.num_kv_heads, spec_.head_dim),
                      .v = head_view(qkv, q_width + kv_width, cut_.num_kv_heads, spec_.head_dim),
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
    normalise_heads(context, args);
  }
  return args;
}

void Attention::normalise_heads(const ForwardContext& context, PrepareQkvArgs& args) const {
  if (has_norm_over_ranks()) {
    args.q = norm_over_ranks(context, args.q, *q_norm_, spec_.num_heads, cut_.first_head, given_);
    args.k = norm_over_ranks(context, args.k, *k_norm_, spec_.num_kv_heads, cut_.first_kv_head,
                             given_kv_);
    return;
  }
  q_norm_->forward(context, args.q, cut_.first_head);
  k_norm_->forward(context, args.k, cut_.first_kv_head);
}

Tensor Attention::norm_over_ranks(const ForwardContext& context, const Tensor& heads,
                                  const HeadNorm& norm, int64_t num_heads, int64_t first,
                                  const ColumnCut& given) const {
  const Tensor all =
      context.arena.allocate(DType::kF32, {heads.shape[0], num_heads * spec_.head_dim});
  Tensor own = heads.slice(1, 0, 1);  // as columns
  own.rank = 2;
  own.shape[1] = given.size();
  own.strides[1] = 1;
  given.gather(context, own, all, Communicator::kAll);
  norm.forward(context, as_heads(all, num_heads));
  return head_view(all, first * spec_.head_dim, heads.shape[1], spec_.head_dim);
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
  const auto rows = [&](int64_t width) {
    return Arena::footprint_bytes(DType::kF32, {num_tokens, width});
  };
  const int64_t q_width = spec_.num_heads * spec_.head_dim;
  const int64_t kv_width = spec_.num_kv_heads * spec_.head_dim;
  return rows(qkv_.out_features()) + output_.workspace_bytes(num_tokens) +
         (has_norm_over_ranks() ? rows(q_width) + rows(kv_width) : 0) + context_.workspace_bytes();
}

}  // namespace llmserve
