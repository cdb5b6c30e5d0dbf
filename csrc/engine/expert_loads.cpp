#include "engine/expert_loads.h"

#include <algorithm>

#include "models/layer_kinds.h"

namespace llmserve {

ExpertLoads::ExpertLoads(const ModelConfig& config)
    : num_experts_(config.experts.num_experts),
      counts_(static_cast<size_t>(config.num_layers * config.experts.num_experts)) {
  for (int64_t i = 0; i < config.num_layers; ++i)
    if (config.layers[static_cast<size_t>(i)].feed_forward == &kExperts)
      expert_layers_.push_back(i);
}

void ExpertLoads::start() {
  const std::lock_guard lock(device_mutex_);
  for (OnDevice& device : on_devices_)
    if (!device.counts) device.counts = device.steps->make_id_counts(std::ssize(counts_));
  // What devices have counted so far is taken off.
  for (size_t i = 0; i < counts_.size(); ++i) {
    counts_[i].store(0, std::memory_order_relaxed);
    counts_[i].store(-count(i), std::memory_order_relaxed);
  }
  is_counting_.store(true, std::memory_order_release);
}

void ExpertLoads::see(int64_t layer_idx, const ConstTensor& ids) {
  for (const OnDevice& device : on_devices_)
    if (device.layers.begin <= layer_idx && layer_idx < device.layers.end)
      return device.counts->add(ids, layer_idx * num_experts_, num_experts_);
  const int32_t* id = ids.as<int32_t>();
  std::atomic<int64_t>* counts = counts_.data() + layer_idx * num_experts_;
  for (int64_t i = 0; i < ids.num_elements(); ++i)
    counts[id[i]].fetch_add(1, std::memory_order_relaxed);
}

void ExpertLoads::join_device(DeviceSteps* steps, const LayerRange& layers) {
  const std::lock_guard lock(device_mutex_);
  on_devices_.push_back({.steps = steps, .layers = layers, .counts = nullptr});
}

void ExpertLoads::leave_device(const DeviceSteps* steps) {
  const std::lock_guard lock(device_mutex_);
  const auto left = std::ranges::find(on_devices_, steps, &OnDevice::steps);
  if (left == on_devices_.end()) return;
  for (size_t i = 0; left->counts && i < counts_.size(); ++i)
    counts_[i].fetch_add(left->counts->count(static_cast<int64_t>(i)), std::memory_order_relaxed);
  on_devices_.erase(left);
}

int64_t ExpertLoads::count(size_t i) const {
  int64_t sum = counts_[i].load(std::memory_order_relaxed);
  for (const OnDevice& device : on_devices_)
    if (device.counts) sum += device.counts->count(static_cast<int64_t>(i));
  return sum;
}

std::vector<ExpertLoads::Layer> ExpertLoads::layers() const {
  std::vector<Layer> layers;
  if (!is_counting()) return layers;
  const std::lock_guard lock(device_mutex_);
  for (const int64_t layer_idx : expert_layers_) {
    Layer& layer = layers.emplace_back(Layer{.layer_idx = layer_idx});
    for (int64_t expert = 0; expert < num_experts_; ++expert)
      layer.rows.push_back(count(static_cast<size_t>(layer_idx * num_experts_ + expert)));
  }
  return layers;
}

std::shared_ptr<ExpertLoads> make_expert_loads(const ModelConfig& config) {
  return config.experts.num_experts == 0 ? nullptr : std::make_shared<ExpertLoads>(config);
}

}  // namespace llmserve
