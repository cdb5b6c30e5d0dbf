// Experts that stand whole on ranks of one machine, kept balanced: which ranks run which experts
// follows the loads, and what is too much for one goes to others.
//
// The ranks are threads of one process, so that each reads the weights of all: a copy of an expert,
// or an expert that moves, is a pointer and takes no memory. Rows are the same bits whoever runs
// them.
//
// Ranks with devices have places for as many experts as they were given, and exchange what moves;
// rows run where their expert lies, so that no rank stands in for one that has too many.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/buffer.h"
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
    std::optional<ExpertPlaces> places;           // on devices
    std::vector<int64_t> loads;                   // [X] rows, of the steps that count
    std::vector<int64_t> seen;                    // on devices: [X] rows that rank_rows has
    std::vector<std::atomic<int64_t>> rank_rows;  // [W] that each rank has run
  };

  // Throws InvalidArgument.
  ExpertBalancer(const ExpertBalanceOptions& options, int64_t num_layers, int64_t num_experts,
                 int32_t num_ranks);

  // The layers of a stage, by rank [W]: after they are loaded, and whenever they are loaded anew.
  // Throws NotSupported where the experts of a layer are in several formats.
  void link(std::span<const std::vector<RankExperts>> ranks);
  // The same of ranks with devices, which have counted `count_rows`, by layer, since they began:
  // experts lie as they were loaded.
  using CountRows = std::function<std::vector<std::pair<int64_t, std::vector<int64_t>>>()>;
  void link_devices(CountRows count_rows);
  // Before a step, while no rank runs one. Whether experts of devices are to move.
  bool begin_step();
  // Then, once: what moves, by layer.
  struct Moves {
    int64_t layer_idx = 0;
    std::vector<ExpertMove> moves;
  };
  std::vector<Moves> move();
  // [layers, X, 3] of a rank with a device, as OwnExperts has it.
  std::vector<int32_t> homes_of(int32_t rank) const;
  int64_t num_experts() const { return num_experts_; }
  // Whether the step under way counts.
  bool is_counting() const { return is_counting_; }
  double capacity_factor() const { return options_.capacity_factor; }
  // Of a layer that has been linked. Written by the first rank of its stage alone, but for
  // rank_rows, of which each rank writes its own.
  Layer& layer(int64_t layer_idx) { return *layers_[static_cast<size_t>(layer_idx)]; }

  // Any thread: rows that each rank has run, by layer, in order. Of devices, what was counted so
  // far, of copies in equal shares.
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
  // Of devices: adds what was counted since to the loads and to rank_rows.
  void take_counts() const;
  void count_rank_rows(Layer& layer, std::span<const int64_t> rows) const;

  mutable std::mutex counts_mutex_;             // of devices: guards homes and rank_rows
  CountRows count_rows_;                        // none: ranks of a host
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
  // Of a rank with a device, whose memory it is: has where experts lie there from now on. Nothing
  // is under way there. Throws what Memory throws.
  void bring_homes(Memory& memory);
  // [X, 3], as OwnExperts has it.
  ConstTensor homes(int64_t layer_idx) const;
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
  Buffer homes_;  // [layers, X, 3] i32, or none
  RowAssigner assigner_;
};

}  // namespace llmserve
