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

LinearSpec up_spec(const MlpSpec& spec, const ColumnCut& cut) {
  return {.has_bias = spec.has_bias, .is_transposed = spec.is_transposed, .shard = cut.shard()};
}

Linear down_linear(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
                   const MlpSpec& spec) {
  return {weights,
          WeightGroup::kMlp,
          {{prefix + names.down, spec.hidden_size}},
          spec.intermediate_size,
          {.has_bias = spec.has_bias, .is_transposed = spec.is_transposed, .is_gathered = true}};
}

ColumnCut activation_cut(const WeightLoader& weights, const MlpSpec& spec) {
  return {weights.rank(), spec.intermediate_size, "activations of a feed-forward layer"};
}

}  // namespace

GatedMlp::GatedMlp(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
                   const MlpSpec& spec)
    : spec_(spec),
      max_rows_(weights.backend().mlp_rows()),
      cut_(activation_cut(weights, spec)),
      gate_up_(weights, WeightGroup::kMlp, gate_up_parts(names, prefix, spec.intermediate_size),
               spec.hidden_size, up_spec(spec, cut_)),
      down_(down_linear(weights, names, prefix, spec)) {}

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
  const Tensor activated =
      context.arena.allocate(DType::kF32, {x.num_rows(), spec_.intermediate_size});
  const auto up = gate_up_.as_one(context, x.x, gate_up);
  const auto down = down_.as_one(context, activated, out, accumulate);
  if (up && down) {
    const GatedActivationArgs gate{
        .gate_up = gate_up, .out = activated, .activation = spec_.activation};
    return context.backend.fused_mlp(
        {.up = {.norm = x.norm, .linear = *up, .gate = gate}, .down = *down});
  }
  gate_up_.forward_gated(context, x, gate_up, cut_.own(activated), spec_.activation);
  cut_.gather(context, activated);
  down_.forward(context, {activated}, out, accumulate);
}

int64_t GatedMlp::workspace_bytes(int64_t num_tokens) const {
  const int64_t rows = std::min(max_rows_, num_tokens);
  return Arena::footprint_bytes(DType::kF32, {rows, gate_up_.out_features()}) +
         Arena::footprint_bytes(DType::kF32, {rows, spec_.intermediate_size});
}

PlainMlp::PlainMlp(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
                   const MlpSpec& spec)
    : spec_(spec),
      max_rows_(weights.backend().mlp_rows()),
      cut_(activation_cut(weights, spec)),
      up_(weights, WeightGroup::kMlp, {{prefix + names.up, spec.intermediate_size}},
          spec.hidden_size, up_spec(spec, cut_)),
      down_(down_linear(weights, names, prefix, spec)) {}

void PlainMlp::forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
                       bool accumulate) const {
  for (int64_t begin = 0; begin < x.num_rows(); begin += max_rows_) {
    const Arena::Scope scope(context.arena);
    const int64_t count = std::min(max_rows_, x.num_rows() - begin);
    const Tensor up = context.arena.allocate(DType::kF32, {count, spec_.intermediate_size});
    const Tensor own = cut_.own(up);
    up_.forward(context, x.rows(begin, count), own);
    context.backend.activation({.x = own, .out = own, .activation = spec_.activation});
    cut_.gather(context, up);
    down_.forward(context, {up}, out.slice(0, begin, count), accumulate);
  }
}

int64_t PlainMlp::workspace_bytes(int64_t num_tokens) const {
  return Arena::footprint_bytes(DType::kF32,
                                {std::min(max_rows_, num_tokens), spec_.intermediate_size});
}

}  // namespace llmserve
