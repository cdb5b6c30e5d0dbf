#include "testing/split_mlp.h"

#include <algorithm>
#include <vector>

namespace llmserve {
namespace {

constexpr int32_t kNumHalves = 2;

class SplitMlp final : public FeedForward {
 public:
  SplitMlp(WeightLoader& weights, const ModelConfig& config, const std::string& prefix)
      : activation_(config.activation) {
    const int64_t width = config.intermediate_size;
    for (int32_t rank = 0; rank < kNumHalves; ++rank) {
      const Shard of_outputs{.axis = ShardAxis::kOutput, .rank = rank, .size = kNumHalves};
      const Shard of_inputs{.axis = ShardAxis::kInput, .rank = rank, .size = kNumHalves};
      halves_.push_back(
          {.gate_up = {weights,
                       WeightGroup::kMlp,
                       {{prefix + config.names.gate, width}, {prefix + config.names.up, width}},
                       config.hidden_size,
                       {.has_bias = config.mlp_bias, .shard = of_outputs}},
           .down = {weights,
                    WeightGroup::kMlp,
                    {{prefix + config.names.down, config.hidden_size}},
                    width,
                    {.has_bias = config.mlp_bias, .shard = of_inputs}}});
    }
  }

  void forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
               bool accumulate) const override {
    LinearInput input = x;
    for (const Half& half : halves_) {
      const Arena::Scope scope(context.arena);
      const int64_t width = half.gate_up.out_features();
      const Tensor gate_up = context.arena.allocate(DType::kF32, {x.num_rows(), width});
      const Tensor activated = context.arena.allocate(DType::kF32, {x.num_rows(), width / 2});
      half.gate_up.forward_gated(context, input, gate_up, activated, activation_);
      half.down.forward(context, {activated}, out, accumulate || &half != &halves_.front());
      input.norm.reset();  // it has been written, and what it is of has changed
    }
  }

  int64_t workspace_bytes(int64_t num_tokens) const override {
    int64_t bytes = 0;
    for (const Half& half : halves_) {
      const int64_t width = half.gate_up.out_features();
      bytes = std::max(bytes, Arena::footprint_bytes(DType::kF32, {num_tokens, width}) +
                                  Arena::footprint_bytes(DType::kF32, {num_tokens, width / 2}));
    }
    return bytes;
  }

 private:
  struct Half {
    Linear gate_up;
    Linear down;
  };
  Activation activation_;
  std::vector<Half> halves_;
};

}  // namespace

const FeedForwardKind kSplitMlp{
    .name = "split",
    .make = [](WeightLoader& weights, const ModelConfig& config, int64_t layer_idx) {
      return std::unique_ptr<FeedForward>(
          std::make_unique<SplitMlp>(weights, config, layer_prefix(config, layer_idx)));
    }};

}  // namespace llmserve
