// Every op from its checks to its backend, and the fused ops as the ops that they stand for.
#include "core/error.h"
#include "core/thread_beat.h"
#include "kernels/backend.h"

namespace llmserve {
namespace {

bool is_same(const ConstTensor& a, const ConstTensor& b) {
  return a.data == b.data && a.rank == b.rank && a.shape == b.shape && a.strides == b.strides;
}

RmsNormArgs norm_of(const PrepareQkvArgs& args, const Tensor& heads, const ConstTensor& weight) {
  return {.x = heads, .weight = weight, .out = heads, .numbers = args.numbers};
}

RotaryArgs rotary_of(const PrepareQkvArgs& args, const Tensor& heads, const ConstTensor& angles) {
  return {.heads = heads, .cos_sin = angles, .interleaved = args.interleaved};
}

StoreKvArgs store_of(const PrepareQkvArgs& args) {
  return {.keys = args.k, .values = args.v, .slots = args.slots, .cache = args.cache};
}

// Queries and keys lie side by side and rotate alike: one call for both.
bool rotate_as_one(const PrepareQkvArgs& args) {
  return is_same(args.q_cos_sin, args.k_cos_sin) && args.q.strides == args.k.strides &&
         args.q.strides[1] == args.q.shape[2] &&
         args.q.as<float>() + args.q.shape[1] * args.q.strides[1] == args.k.as<float>();
}

// That one op's result is what the next one reads; the ops check the rest.
void check_links(const FusedLinearArgs& args) {
  if (args.norm && !is_same(args.norm->out, args.linear.x))
    throw InvalidArgument("fused_linear.norm: expected the linear layer's x as its out");
  if (args.norm && args.norm->x.data == args.norm->out.data)
    throw InvalidArgument("fused_linear.norm: expected an out apart from x");
  if (args.gate && !is_same(args.gate->gate_up, args.linear.out))
    throw InvalidArgument("fused_linear.gate: expected the linear layer's out as its gate_up");
  if (args.gate && args.linear.accumulate)
    throw InvalidArgument("fused_linear.linear.accumulate: expected none beside a gate");
}

void check_links(const FusedMlpArgs& args) {
  if (!args.up.gate) throw InvalidArgument("fused_mlp.up.gate: expected a gate");
  if (!is_same(args.up.gate->out, args.down.x))
    throw InvalidArgument("fused_mlp.down.x: expected the gate's out");
}

void check_links(const FusedExpertsArgs& args) {
  if (!is_same(args.gate.gate_up, args.up.out))
    throw InvalidArgument("fused_experts.gate.gate_up: expected up's out");
  if (!is_same(args.down.x, args.gate.out))
    throw InvalidArgument("fused_experts.down.x: expected the gate's out");
  if (!is_same(args.down.weight_ids, args.up.weight_ids) ||
      args.down.weights.size() != args.up.weights.size())
    throw InvalidArgument("fused_experts.down.weight_ids: expected those of up");
  if (!is_same(args.combine.x, args.down.out) || !args.down.out.is_contiguous() ||
      !args.up.out.is_contiguous())
    throw InvalidArgument("fused_experts.combine.x: expected down's out, contiguous as up's");
}

void check_links(const FusedAttentionArgs& args) {
  const Tensor& attended = args.attention.out;
  const ConstTensor& x = args.output.x;
  if (!attended.is_contiguous() || !x.is_contiguous() || x.data != attended.data || x.rank != 2 ||
      x.shape[0] != attended.shape[0] || x.num_elements() != attended.num_elements())
    throw InvalidArgument(concat("fused_attention.output.x: expected the contiguous out ",
                                 describe(attended), " of attention as rows, got ", describe(x)));
  if (!args.prepare) return;
  if (!is_same(args.prepare->q, args.attention.q))
    throw InvalidArgument("fused_attention.prepare.q: expected attention's q");
  const PagedKvCache& cache = args.attention.cache;
  if (!is_same(args.prepare->cache.keys, cache.keys) ||
      !is_same(args.prepare->cache.values, cache.values))
    throw InvalidArgument("fused_attention.prepare.cache: expected attention's cache");
}

void check_links(const PrepareQkvArgs& args) {
  if (args.q.rank != 3 || args.q.shape[0] != args.k.shape[0] || args.q.shape[2] != args.k.shape[2])
    throw InvalidArgument(concat("prepare_qkv.q: expected [T=", args.k.shape[0], ", H, D=",
                                 args.k.shape[2], "] like the keys, got ", describe(args.q)));
}

}  // namespace

void validate(const FusedLinearArgs& args) {
  check_links(args);
  if (args.norm) validate(*args.norm);
  validate(args.linear);
  if (args.gate) validate(*args.gate);
}

void validate(const FusedMlpArgs& args) {
  check_links(args);
  validate(args.up);
  validate(args.down);
}

void validate(const FusedExpertsArgs& args) {
  check_links(args);
  validate(args.up);
  validate(args.gate);
  validate(args.down);
  validate(args.combine);
}

void validate(const FusedAttentionArgs& args) {
  if (args.prepare) validate(*args.prepare);
  validate(args.attention);
  check_links(args);
  validate(args.output);
}

void validate(const PrepareQkvArgs& args) {
  check_links(args);
  if (args.q_norm) validate(norm_of(args, args.q, args.q_norm));
  if (args.k_norm) validate(norm_of(args, args.k, args.k_norm));
  if (args.q_cos_sin) validate(rotary_of(args, args.q, args.q_cos_sin));
  if (args.k_cos_sin) validate(rotary_of(args, args.k, args.k_cos_sin));
  validate(store_of(args));
}

#define LLMSERVE_OP(name, Args)          \
  void Backend::name(const Args& args) { \
    validate(args);                      \
    beat(#name);                         \
    do_##name(args);                     \
  }
#include "kernels/op_list.inc"

void Backend::do_fused_linear(const FusedLinearArgs& args) {
  if (args.norm) do_rms_norm(*args.norm);
  do_linear(args.linear);
  if (args.gate) do_gated_activation(*args.gate);
}

void Backend::do_fused_mlp(const FusedMlpArgs& args) {
  do_fused_linear(args.up);
  do_linear(args.down);
}

void Backend::do_fused_experts(const FusedExpertsArgs& args) {
  do_grouped_linear(args.up);
  do_gated_activation(args.gate);
  do_grouped_linear(args.down);
  do_combine_experts(args.combine);
}

void Backend::do_fused_attention(const FusedAttentionArgs& args) {
  if (args.prepare) do_prepare_qkv(*args.prepare);
  do_paged_attention(args.attention);
  do_linear(args.output);
}

void Backend::do_prepare_qkv(const PrepareQkvArgs& args) {
  if (args.q_norm) do_rms_norm(norm_of(args, args.q, args.q_norm));
  if (args.k_norm) do_rms_norm(norm_of(args, args.k, args.k_norm));
  if (args.q_cos_sin && rotate_as_one(args)) {
    Tensor both = args.q;
    both.shape[1] += args.k.shape[1];
    do_rotary(rotary_of(args, both, args.q_cos_sin));
  } else {
    if (args.q_cos_sin) do_rotary(rotary_of(args, args.q, args.q_cos_sin));
    if (args.k_cos_sin) do_rotary(rotary_of(args, args.k, args.k_cos_sin));
  }
  do_store_kv(store_of(args));
}

}  // namespace llmserve
