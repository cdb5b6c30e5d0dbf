#include "layers/mlp.h"

#include <algorithm>

namespace llmserve {
namespace {

std::vector<WeightPart> up_parts(const TensorNames& names, const std::string& prefix,
                                 int64_t width) {
  if (!names.gate_up.empty()) return {{prefix + names.gate_up, 2 * width}};
  if (!names.gate.empty()) return {{prefix + names.gate, width}, {prefix + names.up, width}};
  return {{prefix + names.up, width}};
}

}  // namespace

Mlp::Mlp(WeightLoader& weights, const TensorNames& names, const std::string& prefix,
         const MlpSpec& spec)
    : spec_(spec),
      max_rows_(weights.backend().mlp_rows()),
      is_gated_(!names.gate_up.empty() || !names.gate.empty()),
      up_(weights, WeightGroup::kMlp, up_parts(names, prefix, spec.intermediate_size),
          spec.hidden_size, {.has_bias = spec.has_bias, .is_transposed = spec.is_transposed}),
      down_(weights, WeightGroup::kMlp, {{prefix + names.down, spec.hidden_size}},
            spec.intermediate_size,
            {.has_bias = spec.has_bias, .is_transposed = spec.is_transposed}) {}

void Mlp::forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
                  bool accumulate) const {
  for (int64_t begin = 0; begin < x.num_rows(); begin += max_rows_) {
    const Arena::Scope scope(context.arena);
    const int64_t count = std::min(max_rows_, x.num_rows() - begin);
    const LinearInput rows = x.rows(begin, count);
    const Tensor out_rows = out.slice(0, begin, count);
    const Tensor up = context.arena.allocate(DType::kF32, {count, up_.out_features()});
    if (is_gated_) {
      forward_gated(context, rows, up, out_rows, accumulate);
    } else {
      up_.forward(context, rows, up);
      context.backend.activation({.x = up, .out = up, .activation = spec_.activation});
      down_.forward(context, {up}, out_rows, accumulate);
    }
  }
}

void Mlp::forward_gated(const ForwardContext& context, const LinearInput& x, const Tensor& gate_up,
                        const Tensor& out, bool accumulate) const {
  const Tensor activated =
      context.arena.allocate(DType::kF32, {x.num_rows(), spec_.intermediate_size});
  const auto up = up_.as_one(x.x, gate_up);
  const auto down = down_.as_one(activated, out, accumulate);
  if (up && down) {
    const GatedActivationArgs gate{
        .gate_up = gate_up, .out = activated, .activation = spec_.activation};
    return context.backend.fused_mlp(
        {.up = {.norm = x.norm, .linear = *up, .gate = gate}, .down = *down});
  }
  up_.forward_gated(context, x, gate_up, activated, spec_.activation);
  down_.forward(context, {activated}, out, accumulate);
}

int64_t Mlp::workspace_bytes(int64_t num_tokens) const {
  const int64_t rows = std::min(max_rows_, num_tokens);
  int64_t bytes = Arena::footprint_bytes(DType::kF32, {rows, up_.out_features()});
  if (is_gated_) bytes += Arena::footprint_bytes(DType::kF32, {rows, spec_.intermediate_size});
  return bytes;
}

}  // namespace llmserve
