#include "layers/attention.h"

#include <cmath>

namespace llmserve {
namespace {

// Columns [begin, begin + num_heads * head_dim) of rows [T, W], seen as [T, num_heads, head_dim].
Tensor head_view(const Tensor& rows, int64_t begin, int64_t num_heads, int64_t head_dim) {
  Tensor view = rows.slice(1, begin, num_heads * head_dim);
  view.rank = 3;
  view.shape[1] = num_heads;
  view.shape[2] = head_dim;
  view.strides[1] = head_dim;
  view.strides[2] = 1;
  return view;
}

}  // namespace

Attention::Attention(WeightLoader& weights, const std::string& prefix, const AttentionSpec& spec)
    : spec_(spec),
      qkv_(weights, WeightGroup::kAttention,
           {{prefix + ".q_proj", spec.num_heads * spec.head_dim},
            {prefix + ".k_proj", spec.num_kv_heads * spec.head_dim},
            {prefix + ".v_proj", spec.num_kv_heads * spec.head_dim}},
           spec.hidden_size, spec.qkv_bias),
      output_(weights, WeightGroup::kAttention, {{prefix + ".o_proj", spec.hidden_size}},
              spec.num_heads * spec.head_dim, spec.output_bias) {
  if (spec.has_qk_norm) {
    q_norm_.emplace(weights, prefix + ".q_norm.weight", spec.head_dim, spec.norm_eps);
    k_norm_.emplace(weights, prefix + ".k_norm.weight", spec.head_dim, spec.norm_eps);
  }
}

void Attention::forward(const ForwardContext& context, const ConstTensor& x,
                        const ConstTensor& cos_sin, const PagedKvCache& cache,
                        const Tensor& residual) const {
  const Arena::Scope scope(context.arena);
  const ModelInput& input = context.input;
  const int64_t num_tokens = input.num_tokens();
  const int64_t head_dim = spec_.head_dim;
  const int64_t q_width = spec_.num_heads * head_dim;
  const int64_t kv_width = spec_.num_kv_heads * head_dim;

  const Tensor qkv = context.arena.allocate(DType::kF32, {num_tokens, qkv_.out_features()});
  qkv_.forward(context, x, qkv);
  const Tensor q = head_view(qkv, 0, spec_.num_heads, head_dim);
  const Tensor k = head_view(qkv, q_width, spec_.num_kv_heads, head_dim);
  const Tensor v = head_view(qkv, q_width + kv_width, spec_.num_kv_heads, head_dim);
  if (q_norm_) {
    q_norm_->forward(context, q, q);
    k_norm_->forward(context, k, k);
  }
  // Queries and keys lie side by side, so that one call turns both.
  context.backend.rotary(
      {.heads = head_view(qkv, 0, spec_.num_heads + spec_.num_kv_heads, head_dim),
       .cos_sin = cos_sin});
  context.backend.store_kv({.keys = k, .values = v, .slots = input.slots, .cache = cache});

  const Tensor attended = context.arena.allocate(DType::kF32, {num_tokens, q_width});
  context.backend.paged_attention({.q = q,
                                   .cache = cache,
                                   .query_starts = input.query_starts,
                                   .kv_lens = input.kv_lens,
                                   .block_tables = input.block_tables,
                                   .max_blocks = input.max_blocks,
                                   .scale = 1.0f / std::sqrt(static_cast<float>(head_dim)),
                                   .window = spec_.window,
                                   .out = head_view(attended, 0, spec_.num_heads, head_dim)});
  output_.forward(context, attended, residual, /*accumulate=*/true);
}

int64_t Attention::workspace_bytes(int64_t num_tokens) const {
  return Arena::footprint_bytes(DType::kF32, {num_tokens, qkv_.out_features()}) +
         Arena::footprint_bytes(DType::kF32, {num_tokens, spec_.num_heads * spec_.head_dim});
}

}  // namespace llmserve
