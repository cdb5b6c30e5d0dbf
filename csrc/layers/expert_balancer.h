// Experts that stand whole on ranks of one machine, kept balanced: which ranks run which experts
// follows the loads, and what is too much for one goes to others.
//
// The ranks are threads of one process, so that each reads the weights of all: a copy of an expert,
// or an expert that moves, is a pointer and takes no memory. Rows are the same bits whoever runs
// them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "layers/expert_linear.h"
#include "layers/expert_placement.h"
#include "layers/forward_context.h"

namespace llmserve {

// A rank's products of a layer of experts.
struct RankExperts {
  int64_t layer_idx = 0;
  const ExpertLinear* gate_up = nullptr;
  const ExpertLinear* down = nullptr;
};

// Of all layers of a model, for all of its ranks.
class ExpertBalancer {
 public:
  struct Layer {
    // Of all experts, whoever has them.
    ExpertLinear::Joined gate_up;
    ExpertLinear::Joined down;
    ExpertHomes homes;
    std::vector<int64_t> loads;                   // [X] rows, of the steps that count
    std::vector<std::atomic<int64_t>> rank_rows;  // [W] that each rank has run
  };

  // Throws InvalidArgument.
  ExpertBalancer(const ExpertBalanceOptions& options, int64_t num_layers, int64_t num_experts,
                 int32_t num_ranks);

  // The layers of a stage, by rank [W]: after they are loaded, and whenever they are loaded anew.
  // Throws NotSupported where the experts of a layer are in several formats.
  void link(std::span<const std::vector<RankExperts>> ranks);
  // Before a step, while no rank runs one.
  void begin_step();
  // Whether the step under way counts.
  bool is_counting() const { return is_counting_; }
  double capacity_factor() const { return options_.capacity_factor; }
  // Of a layer that has been linked. Written by the first rank of its stage alone, but for
  // rank_rows, of which each rank writes its own.
  Layer& layer(int64_t layer_idx) { return *layers_[static_cast<size_t>(layer_idx)]; }

  // Any thread: rows that each rank has run, by layer, in order.
  struct RankRows {
    int64_t layer_idx = 0;
    std::vector<int64_t> rows;  // [W]
  };
  std::vector<RankRows> rank_rows() const;
  // How often experts were packed.
  int64_t num_packings() const { return num_packings_.load(std::memory_order_relaxed); }

 private:
  const ExpertBalanceOptions options_;
  const int64_t num_experts_;
  const int32_t num_ranks_;
  std::vector<std::unique_ptr<Layer>> layers_;  // [layers] of the model; null: a dense one
  int64_t num_steps_ = 0;
  bool is_counting_ = false;
  std::atomic<int64_t> num_packings_ = 0;
};

// One rank's view of it, in ForwardContext::routes.
class RankRoutes final : public RouteObserver {
 public:
  RankRoutes(std::shared_ptr<ExpertBalancer> balancer, int32_t rank)
      : balancer_(std::move(balancer)), rank_(rank) {}

  // Who else sees the routes, or null.
  void show_to(RouteObserver* next) { next_ = next; }
  void see(int64_t layer_idx, const ConstTensor& ids) override;
  const ExpertBalancer::Layer& layer(int64_t layer_idx) const {
    return balancer_->layer(layer_idx);
  }
  // The rank of each row of ids [T, k], alike on all ranks; counts this rank's. Valid until the
  // next call.
  std::span<const int32_t> assign(int64_t layer_idx, const ConstTensor& ids);

 private:
  const std::shared_ptr<ExpertBalancer> balancer_;
  const int32_t rank_;
  RouteObserver* next_ = nullptr;
  RowAssigner assigner_;
};

}  // namespace llmserve
