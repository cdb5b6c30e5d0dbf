#include "layers/gated_mlp.h"

#include <algorithm>

namespace llmserve {
namespace {

// Rows at a time: 3 F floats a row are the largest activations of a step. 512 rows use a weight
// 512 times a read, many times what keeps a CPU busy, and bound the workspace whatever T is. Rows
// do not affect each other, so that the cut does not change a bit.
constexpr int64_t kRows = 512;

}  // namespace

GatedMlp::GatedMlp(WeightLoader& weights, const std::string& prefix, const GatedMlpSpec& spec)
    : spec_(spec),
      gate_up_(weights, WeightGroup::kMlp,
               {{prefix + ".gate_proj", spec.intermediate_size},
                {prefix + ".up_proj", spec.intermediate_size}},
               spec.hidden_size, spec.has_bias),
      down_(weights, WeightGroup::kMlp, {{prefix + ".down_proj", spec.hidden_size}},
            spec.intermediate_size, spec.has_bias) {}

void GatedMlp::forward(const ForwardContext& context, const Tensor& x,
                       const Tensor& residual) const {
  for (int64_t begin = 0; begin < x.shape[0]; begin += kRows) {
    const Arena::Scope scope(context.arena);
    const int64_t rows = std::min(kRows, x.shape[0] - begin);
    const Tensor gate_up = context.arena.allocate(DType::kF32, {rows, 2 * spec_.intermediate_size});
    const Tensor gated = context.arena.allocate(DType::kF32, {rows, spec_.intermediate_size});
    gate_up_.forward(context, x.slice(0, begin, rows), gate_up);
    context.backend.gated_activation(
        {.gate_up = gate_up, .out = gated, .activation = spec_.activation});
    down_.forward(context, gated, residual.slice(0, begin, rows), /*accumulate=*/true);
  }
}

int64_t GatedMlp::workspace_bytes(int64_t num_tokens) const {
  const int64_t rows = std::min(kRows, num_tokens);
  return Arena::footprint_bytes(DType::kF32, {rows, 2 * spec_.intermediate_size}) +
         Arena::footprint_bytes(DType::kF32, {rows, spec_.intermediate_size});
}

}  // namespace llmserve
