// A feed-forward layer of experts, of which a router gives each token a few. Shazeer et al. 2017.
#pragma once

#include <optional>
#include <string>

#include "layers/expert_balancer.h"
#include "layers/expert_dispatch.h"
#include "layers/expert_linear.h"
#include "layers/expert_spec.h"
#include "layers/feed_forward.h"
#include "layers/mlp.h"
#include "layers/segment_sum.h"

namespace llmserve {

// out[t] = sum over the token's experts i of weight_i * down_i(activation(gate_i(x)) * up_i(x)),
// plus what an expert gives that all tokens have. No token is left out, however many an expert has.
class Experts final : public FeedForward {
 public:
  // Weights "<prefix><spec.names.router>" and so on. `mlp` is of the model's dense layers: hidden
  // size and activation count.
  Experts(WeightLoader& weights, const std::string& prefix, int64_t layer_idx,
          const ExpertSpec& spec, const MlpSpec& mlp);

  void forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
               bool accumulate) const override;
  int64_t workspace_bytes(int64_t num_tokens) const override;
  RankExperts rank_experts() const { return {layer_idx_, &gate_up_, &down_}; }

 private:
  // Which experts each token has, and their weights.
  struct Routes {
    Tensor ids;      // [T, k] i32
    Tensor weights;  // [T, k]
  };
  // What the expert that all tokens have gives.
  struct SharedRows {
    Tensor rows;    // [T, E]; none: there is no such expert
    Tensor weight;  // [T, 1] what they are multiplied by; none: 1
  };
  // Of at most max_rows_, whose norm is done.
  void forward_rows(const ForwardContext& context, const ConstTensor& x, const Tensor& out,
                    bool accumulate) const;
  // `scaled` [T, E], where the spec asks for it, is x by the weights, which are then 1.
  void route(const ForwardContext& context, const ConstTensor& x, const Routes& routes,
             const Tensor& scaled) const;
  // part: of SharedRows this rank's, which the sum over the ranks takes along.
  void run_experts(const ForwardContext& context, const ConstTensor& x, const Routes& routes,
                   const SharedRows& part, const Tensor& out, bool accumulate) const;
  // Likewise, of this rank's experts alone, and the other ranks' rows brought to them.
  void run_whole_experts(const ForwardContext& context, const ConstTensor& x, const Routes& routes,
                         const Tensor& out, bool accumulate) const;
  // Likewise, where ranks have a device each.
  void share_whole_experts(const ForwardContext& context, const ConstTensor& x,
                           const Routes& routes, const Tensor& out, bool accumulate) const;
  Tensor claim_rows(const ForwardContext& context, const Routes& routes, const Tensor& given) const;
  // Likewise, with a sum over the ranks of what theirs give a token.
  void sum_whole_experts(const ForwardContext& context, const ConstTensor& x, const Routes& routes,
                         const SharedRows& part, const Tensor& out, bool accumulate) const;
  // out = the ranks' sums, or is added to.
  void add_sum(const ForwardContext& context, const SharedRows& part, const Tensor& sums,
               const Tensor& out, bool accumulate) const;
  static void add_shared(const ForwardContext& context, const SharedRows& shared,
                         const Tensor& out);
  int64_t activation_width() const;  // of what down_ reads
  int64_t during_experts_bytes(int64_t num_tokens) const;
  // By what the output of the expert that all tokens have is multiplied, [T, 1].
  void weigh_shared(const ForwardContext& context, const ConstTensor& x,
                    const Tensor& weight) const;

  int64_t layer_idx_;
  ExpertSpec spec_;
  int64_t hidden_size_;
  Activation activation_;
  bool is_on_host_;      // what decides which rows run with which expert
  int64_t max_rows_;     // at a time; rows do not affect each other, so that the cut changes no bit
  LinearWeight router_;  // [X, E] f32
  VectorWeight router_bias_;                // [X] or empty
  VectorWeight choice_bias_;                // [X] or empty
  std::optional<ExpertDispatch> dispatch_;  // where experts stand whole on ranks
  InputCut activation_cut_;                 // of each expert's activations
  std::optional<SegmentSum> sum_;           // where experts, or each one's K, are shared out
  ColumnCut output_cut_;                    // of what the layer gives, where they are not
  ExpertLinear gate_up_;
  ExpertLinear down_;
  std::optional<GatedMlp> shared_;
  LinearWeight shared_weight_;  // [1, E] f32, where its output is weighed
};

}  // namespace llmserve
