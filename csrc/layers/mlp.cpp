#include "layers/mlp.h"

namespace llmserve {
namespace {

std::vector<WeightPart> gate_up_parts(const TensorNames& names, const std::string& prefix,
                                      int64_t width) {
  if (!names.gate_up.empty()) return {{prefix + names.gate_up, 2 * width}};
  return {{prefix + names.gate, width}, {prefix + names.up, width}};
}

LinearSpec linear_spec(const MlpSpec& spec) {
  return {.has_bias = spec.has_bias, .is_transposed = spec.is_transposed};
}

Linear down_linear(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
                   const MlpSpec& spec) {
  return {weights,
          WeightGroup::kMlp,
          {{prefix + names.down, spec.hidden_size}},
          spec.intermediate_size,
          linear_spec(spec)};
}

}  // namespace

GatedMlp::GatedMlp(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
                   const MlpSpec& spec)
    : spec_(spec),
      max_rows_(weights.backend().mlp_rows()),
      gate_up_(weights, WeightGroup::kMlp, gate_up_parts(names, prefix, spec.intermediate_size),
               spec.hidden_size, linear_spec(spec)),
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
  gate_up_.forward_gated(context, x, gate_up, activated, spec_.activation);
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
      up_(weights, WeightGroup::kMlp, {{prefix + names.up, spec.intermediate_size}},
          spec.hidden_size, linear_spec(spec)),
      down_(down_linear(weights, names, prefix, spec)) {}

void PlainMlp::forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
                       bool accumulate) const {
  for (int64_t begin = 0; begin < x.num_rows(); begin += max_rows_) {
    const Arena::Scope scope(context.arena);
    const int64_t count = std::min(max_rows_, x.num_rows() - begin);
    const Tensor up = context.arena.allocate(DType::kF32, {count, up_.out_features()});
    up_.forward(context, x.rows(begin, count), up);
    context.backend.activation({.x = up, .out = up, .activation = spec_.activation});
    down_.forward(context, {up}, out.slice(0, begin, count), accumulate);
  }
}

int64_t PlainMlp::workspace_bytes(int64_t num_tokens) const {
  return Arena::footprint_bytes(DType::kF32, {std::min(max_rows_, num_tokens), up_.out_features()});
}

}  // namespace llmserve
