#include "layers/latent_attention.h"

#include <algorithm>

namespace llmserve {
namespace {

std::vector<WeightPart> first_parts(const TensorNames& names, const std::string& prefix,
                                    const LatentDims& dims) {
  const WeightPart latent{prefix + names.kv_a, dims.row_dim()};
  if (dims.query_rank == 0) return {latent};
  return {{prefix + names.q_a, dims.query_rank}, latent};
}

NormSpec inner_norm(const LatentDims& dims) { return {.numbers = {.eps = dims.norm_eps}}; }

// Head by head W_k, which a file with both has as rows of [H * (plain_dim + value_dim), rank], and
// one with it alone as [H, rank, plain_dim].
std::vector<WeightPart> key_parts(const TensorNames& names, const std::string& prefix,
                                  const LatentAttentionSpec& spec, const HeadCut& cut) {
  const LatentDims& dims = spec.dims;
  const int64_t of_head = dims.plain_dim + dims.value_dim;
  std::vector<WeightPart> parts;
  for (int64_t h = cut.first_head; h < cut.first_head + cut.num_heads; ++h)
    parts.push_back(names.k_b.empty() ? WeightPart{.name = prefix + names.kv_b + ".weight",
                                                   .size = dims.rank,
                                                   .in_begin = h * of_head,
                                                   .in_of = spec.num_heads * of_head}
                                      : WeightPart{.name = prefix + names.k_b + ".weight",
                                                   .size = dims.rank,
                                                   .num_matrices = spec.num_heads,
                                                   .matrix = h});
  return parts;
}

// W_v likewise; alone it is [H, value_dim, rank].
std::vector<WeightPart> value_parts(const TensorNames& names, const std::string& prefix,
                                    const LatentAttentionSpec& spec, const HeadCut& cut) {
  const LatentDims& dims = spec.dims;
  const int64_t of_head = dims.plain_dim + dims.value_dim;
  std::vector<WeightPart> parts;
  for (int64_t h = cut.first_head; h < cut.first_head + cut.num_heads; ++h)
    parts.push_back(names.v_b.empty() ? WeightPart{.name = prefix + names.kv_b + ".weight",
                                                   .size = dims.value_dim,
                                                   .begin = h * of_head + dims.plain_dim,
                                                   .of = spec.num_heads * of_head}
                                      : WeightPart{.name = prefix + names.v_b + ".weight",
                                                   .size = dims.value_dim,
                                                   .num_matrices = spec.num_heads,
                                                   .matrix = h});
  return parts;
}

}  // namespace

LatentAttention::LatentAttention(WeightLoader& weights, const TensorNames& names,
                                 const std::string& prefix, const LatentAttentionSpec& spec)
    : spec_(spec),
      cut_(weights.rank(), spec.num_heads, spec.num_heads),
      context_(weights.rank(), spec.num_heads, spec.num_heads),
      first_(weights, WeightGroup::kAttention, first_parts(names, prefix, spec.dims),
             spec.hidden_size, {}),
      query_norm_(spec.dims.query_rank == 0
                      ? std::nullopt
                      : std::optional<Norm>(std::in_place, weights, prefix + names.q_a_norm,
                                            spec.dims.query_rank, inner_norm(spec.dims))),
      latent_norm_(weights, prefix + names.kv_a_norm, spec.dims.rank, inner_norm(spec.dims)),
      query_(weights, WeightGroup::kAttention,
             {{.name = prefix + (query_norm_ ? names.q_b : names.q),
               .size = cut_.num_heads * spec.dims.query_dim(),
               .begin = cut_.first_head * spec.dims.query_dim(),
               .of = spec.num_heads * spec.dims.query_dim()}},
             query_norm_ ? spec.dims.query_rank : spec.hidden_size, {}),
      keys_(weights, WeightGroup::kAttention, key_parts(names, prefix, spec, cut_),
            spec.dims.plain_dim,
            /*is_transposed=*/names.k_b.empty()),
      values_(weights, WeightGroup::kAttention, value_parts(names, prefix, spec, cut_),
              spec.dims.rank),
      output_(weights, WeightGroup::kAttention,
              {.name = prefix + names.attention_output, .out_features = spec.hidden_size},
              head_input(weights.rank(), cut_, spec.dims.value_dim)),
      no_rotation_(
          static_cast<size_t>(spec.query_scaling.growth == 0 ? 0 : spec.dims.plain_dim / 2)) {
  if (names.k_b.empty()) latent_names_.push_back(prefix + names.kv_b + ".weight");
}

void LatentAttention::forward(const ForwardContext& context, const LinearInput& x,
                              const RotaryTables& angles, const PagedKvCache& cache,
                              const Output& to) const {
  const Arena::Scope scope(context.arena);
  const ModelInput& input = context.input;
  const KvGroupInput& group = input.kv_groups[static_cast<size_t>(spec_.kv_group)];
  Tensor row;
  const Tensor queries = project(context, x, angles, row);
  context.backend.store_kv({.keys = as_heads(row, 1), .slots = group.slots, .cache = cache});

  const int64_t num_tokens = input.num_tokens();
  const Tensor attended =
      as_heads(context.arena.allocate(DType::kF32, {num_tokens, cut_.num_heads * spec_.dims.rank}),
               cut_.num_heads);
  context_.attend(context, {.q = absorb(context, queries, angles),
                            .cache = cache,
                            .query_starts = input.query_starts,
                            .kv_lens = input.kv_lens,
                            .block_tables = group.block_tables,
                            .max_blocks = input.max_blocks,
                            .scale = spec_.scale,
                            .window = spec_.window,
                            .out = attended});
  const OutputLinear::Input values = output_.allocate_input(context, num_tokens);
  values_.forward(context, attended, as_heads(values.own, cut_.num_heads));
  const OutputLinear::Target target = output_.begin(context, to.out, to.accumulate);
  output_.run(context, values, target);
  output_.finish(context, target, to.out, to.accumulate);
}

Tensor LatentAttention::project(const ForwardContext& context, const LinearInput& x,
                                const RotaryTables& angles, Tensor& row) const {
  const LatentDims& dims = spec_.dims;
  const int64_t num_tokens = context.input.num_tokens();
  const Tensor first = context.arena.allocate(DType::kF32, {num_tokens, first_.out_features()});
  first_.forward(context, x, first);
  row = first.slice(1, dims.query_rank, dims.row_dim());
  const Tensor latent = row.slice(1, 0, dims.rank);
  latent_norm_.forward(context, latent, latent);
  if (context.observer && !latent_names_.empty()) context.observer->see(latent_names_, latent);

  const Tensor queries = context.arena.allocate(DType::kF32, {num_tokens, query_.out_features()});
  if (query_norm_) {
    const Tensor low = first.slice(1, 0, dims.query_rank);
    query_norm_->forward(context, low, low);
    query_.forward(context, {low}, queries);
  } else {
    query_.forward(context, x, queries);
  }
  if (angles.keys)
    context.backend.rotary({.heads = as_heads(row.slice(1, dims.rank, dims.rotary_dim), 1),
                            .cos_sin = angles.keys,
                            .interleaved = spec_.is_interleaved});
  return as_heads(queries, cut_.num_heads);
}

Tensor LatentAttention::absorb(const ForwardContext& context, const Tensor& queries,
                               const RotaryTables& angles) const {
  const LatentDims& dims = spec_.dims;
  const Tensor absorbed = as_heads(
      context.arena.allocate(DType::kF32, {queries.shape[0], cut_.num_heads * dims.row_dim()}),
      cut_.num_heads);
  const Tensor plain = queries.slice(2, 0, dims.plain_dim);
  if (spec_.query_scaling.growth != 0.0f) scale_queries(context, plain);
  keys_.forward(context, plain, absorbed.slice(2, 0, dims.rank));
  context.backend.rotary({.heads = queries.slice(2, dims.plain_dim, dims.rotary_dim),
                          .cos_sin = angles.queries,
                          .interleaved = spec_.is_interleaved,
                          .out = absorbed.slice(2, dims.rank, dims.rotary_dim)});
  return absorbed;
}

// As a rotation by nothing, whose table has the scale.
void LatentAttention::scale_queries(const ForwardContext& context, const Tensor& plain) const {
  const Arena::Scope scope(context.arena);
  const Tensor table = context.arena.allocate(DType::kF32, {plain.shape[0], spec_.dims.plain_dim});
  context.backend.rotary_table({.positions = context.input.positions,
                                .inv_freq = no_rotation_,
                                .growth = spec_.query_scaling.growth,
                                .period = spec_.query_scaling.period,
                                .cos_sin = table});
  context.backend.rotary({.heads = plain, .cos_sin = table});
}

int64_t LatentAttention::workspace_bytes(int64_t num_tokens) const {
  const LatentDims& dims = spec_.dims;
  const auto rows = [&](int64_t width) {
    return Arena::footprint_bytes(DType::kF32, {num_tokens, width});
  };
  const int64_t table = spec_.query_scaling.growth == 0.0f ? 0 : rows(dims.plain_dim);
  return rows(first_.out_features()) + rows(query_.out_features()) +
         rows(cut_.num_heads * dims.rank) + rows(cut_.num_heads * dims.row_dim()) +
         std::max(table, context_.workspace_bytes() + output_.workspace_bytes(num_tokens));
}

}  // namespace llmserve
