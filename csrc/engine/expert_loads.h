// How many rows each expert was given: what says how evenly a model of experts uses them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/device_steps.h"
#include "layers/forward_context.h"
#include "models/layer_range.h"
#include "models/model_config.h"

namespace llmserve {

// Counts nothing until it is asked to. Written by a worker's thread, or on its device, and read by
// any.
class ExpertLoads final : public RouteObserver {
 public:
  // Loads of one layer: rows of each expert [X].
  struct Layer {
    int64_t layer_idx = 0;
    std::vector<int64_t> rows;
  };

  explicit ExpertLoads(const ModelConfig& config);

  // The routes of these layers are on a device, until leave_device(). Others' are on the host.
  void join_device(DeviceSteps* steps, const LayerRange& layers);
  // Counts from 0 on, from the next step or layer at the latest. Not while a step is under way on a
  // device, where it throws ResourceExhausted if its memory is full.
  void start();
  bool is_counting() const { return is_counting_.load(std::memory_order_acquire); }
  void see(int64_t layer_idx, const ConstTensor& ids) override;
  // Before a device goes: what it has counted stays.
  void leave_device(const DeviceSteps* steps);
  // Of the layers that have experts, in order; none before start().
  std::vector<Layer> layers() const;

 private:
  struct OnDevice {
    DeviceSteps* steps = nullptr;
    LayerRange layers;
    std::unique_ptr<IdCounts> counts;  // [layers, X], from start() on; or null
  };
  int64_t count(size_t i) const;

  int64_t num_experts_;
  std::vector<int64_t> expert_layers_;
  std::vector<std::atomic<int64_t>> counts_;  // [layers, X]; beside those of devices
  mutable std::mutex device_mutex_;   // for who makes or ends what is on a device, or reads it
  std::vector<OnDevice> on_devices_;  // one a stage, or none
  std::atomic<bool> is_counting_ = false;
};

// Null for a model without experts.
std::shared_ptr<ExpertLoads> make_expert_loads(const ModelConfig& config);

}  // namespace llmserve
