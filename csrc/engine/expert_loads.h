// How many rows each expert was given: what says how evenly a model of experts uses them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "layers/forward_context.h"
#include "models/model_config.h"

namespace llmserve {

// Counts nothing until it is asked to. Written by a worker's thread, read by any.
class ExpertLoads final : public RouteObserver {
 public:
  // Loads of one layer: rows of each expert [X].
  struct Layer {
    int64_t layer_idx = 0;
    std::vector<int64_t> rows;
  };

  explicit ExpertLoads(const ModelConfig& config);

  // Counts from 0 on, from the next step or layer at the latest.
  void start();
  bool is_counting() const { return is_counting_.load(std::memory_order_relaxed); }
  void see(int64_t layer_idx, const ConstTensor& ids) override;
  // Of the layers that have experts, in order; none before start().
  std::vector<Layer> layers() const;

 private:
  int64_t num_experts_;
  std::vector<int64_t> expert_layers_;
  std::vector<std::atomic<int64_t>> counts_;  // [layers, X]
  std::atomic<bool> is_counting_ = false;
};

// Null for a model without experts.
std::shared_ptr<ExpertLoads> make_expert_loads(const ModelConfig& config);

}  // namespace llmserve
