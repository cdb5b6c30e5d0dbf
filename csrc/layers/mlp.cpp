#include "layers/mlp.h"

namespace llmserve {
namespace {

std::vector<WeightPart> gate_up_parts(const TensorNames& names, const std::string& prefix,
                                      int64_t width) {
  if (names.gate_up.empty()) return {{prefix + names.gate, width}, {prefix + names.up, width}};
  const WeightPart gate{.name = prefix + names.gate_up, .size = width, .of = 2 * width};
  WeightPart up = gate;
  up.begin = width;
  return {gate, up};
}

LinearSpec up_spec(const MlpSpec& spec, const InputCut& cut) {
  return {
      .has_bias = spec.has_bias, .is_transposed = spec.is_transposed, .shard = cut.given.shard()};
}

OutputLinearSpec down_spec(const TensorNames& names, const std::string& prefix,
                           const MlpSpec& spec) {
  return {.name = prefix + names.down,
          .out_features = spec.hidden_size,
          .has_bias = spec.has_bias,
          .is_transposed = spec.is_transposed};
}

InputCut activation_cut(WeightLoader& weights, const MlpSpec& spec, const OutputLinearSpec& down) {
  return activation_input(weights.rank(), spec.intermediate_size,
                          OutputLinear::input_unit(weights, down, spec.intermediate_size),
                          "activations of a feed-forward layer");
}

}  // namespace

GatedMlp::GatedMlp(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
                   const MlpSpec& spec)
    : spec_(spec),
      max_rows_(weights.backend().mlp_rows()),
      cut_(activation_cut(weights, spec, down_spec(names, prefix, spec))),
      gate_up_(weights, WeightGroup::kMlp, gate_up_parts(names, prefix, spec.intermediate_size),
               spec.hidden_size, up_spec(spec, cut_)),
      down_(weights, WeightGroup::kMlp, down_spec(names, prefix, spec), cut_) {}

void GatedMlp::forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
                       bool accumulate) const {
  for (int64_t begin = 0; begin < x.num_rows(); begin += max_rows_) {
    const int64_t count = std::min(max_rows_, x.num_rows() - begin);
    forward_rows(context, x.rows(begin, count), out.slice(0, begin, count), accumulate);
  }
}

void GatedMlp::forward_rows(const ForwardContext& context, const LinearInput& x, const Tensor& out,
                            bool accumulate) const {
  const Arena::Scope scope(context.arena);
  const Tensor gate_up =
      context.arena.allocate(DType::kF32, {x.num_rows(), gate_up_.out_features()});
  const OutputLinear::Input activated = down_.allocate_input(context, x.num_rows());
  const OutputLinear::Target target = down_.begin(context, out, accumulate);
  const auto up = gate_up_.as_one(context, x.x, gate_up);
  const auto down = down_.as_one(context, activated, target);
  if (up && down) {
    const GatedActivationArgs gate{
        .gate_up = gate_up, .out = activated.own, .activation = spec_.activation};
    context.backend.fused_mlp({.up = {.norm = x.norm, .linear = *up, .gate = gate}, .down = *down});
  } else {
    gate_up_.forward_gated(context, x, gate_up, activated.own, spec_.activation);
    down_.run(context, activated, target);
  }
  down_.finish(context, target, out, accumulate);
}

void GatedMlp::forward_part(const ForwardContext& context, const LinearInput& x,
                            const Tensor& out) const {
  const Arena::Scope scope(context.arena);
  const Tensor gate_up =
      context.arena.allocate(DType::kF32, {x.num_rows(), gate_up_.out_features()});
  const OutputLinear::Input activated = down_.allocate_input(context, x.num_rows());
  const auto up = gate_up_.as_one(context, x.x, gate_up);
  const auto down = down_.part_as_one(context, activated, out);
  if (up && down) {
    const GatedActivationArgs gate{
        .gate_up = gate_up, .out = activated.own, .activation = spec_.activation};
    context.backend.fused_mlp({.up = {.norm = x.norm, .linear = *up, .gate = gate}, .down = *down});
    return;
  }
  gate_up_.forward_gated(context, x, gate_up, activated.own, spec_.activation);
  down_.run_part(context, activated, out);
}

int64_t GatedMlp::workspace_bytes(int64_t num_tokens) const {
  const int64_t rows = std::min(max_rows_, num_tokens);
  return Arena::footprint_bytes(DType::kF32, {rows, gate_up_.out_features()}) +
         down_.workspace_bytes(rows);
}

PlainMlp::PlainMlp(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
                   const MlpSpec& spec)
    : spec_(spec),
      max_rows_(weights.backend().mlp_rows()),
      cut_(activation_cut(weights, spec, down_spec(names, prefix, spec))),
      up_(weights, WeightGroup::kMlp, {{prefix + names.up, spec.intermediate_size}},
          spec.hidden_size, up_spec(spec, cut_)),
      down_(weights, WeightGroup::kMlp, down_spec(names, prefix, spec), cut_) {}

void PlainMlp::forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
                       bool accumulate) const {
  for (int64_t begin = 0; begin < x.num_rows(); begin += max_rows_) {
    const Arena::Scope scope(context.arena);
    const int64_t count = std::min(max_rows_, x.num_rows() - begin);
    const OutputLinear::Input up = down_.allocate_input(context, count);
    up_.forward(context, x.rows(begin, count), up.own);
    context.backend.activation({.x = up.own, .out = up.own, .activation = spec_.activation});
    const Tensor rows = out.slice(0, begin, count);
    const OutputLinear::Target target = down_.begin(context, rows, accumulate);
    down_.run(context, up, target);
    down_.finish(context, target, rows, accumulate);
  }
}

int64_t PlainMlp::workspace_bytes(int64_t num_tokens) const {
  return down_.workspace_bytes(std::min(max_rows_, num_tokens));
}

}  // namespace llmserve
