#include "engine/expert_loads.h"

#include "models/layer_kinds.h"

namespace llmserve {

ExpertLoads::ExpertLoads(const ModelConfig& config, DeviceSteps* steps)
    : num_experts_(config.experts.num_experts),
      counts_(static_cast<size_t>(config.num_layers * config.experts.num_experts)),
      steps_(steps) {
  for (int64_t i = 0; i < config.num_layers; ++i)
    if (config.layers[static_cast<size_t>(i)].feed_forward == &kExperts)
      expert_layers_.push_back(i);
}

void ExpertLoads::start() {
  const std::lock_guard lock(device_mutex_);
  if (steps_ != nullptr && !on_device_) on_device_ = steps_->make_id_counts(std::ssize(counts_));
  // What the device has counted so far is taken off.
  for (size_t i = 0; i < counts_.size(); ++i)
    counts_[i].store(on_device_ ? -on_device_->count(static_cast<int64_t>(i)) : 0,
                     std::memory_order_relaxed);
  is_counting_.store(true, std::memory_order_release);
}

void ExpertLoads::see(int64_t layer_idx, const ConstTensor& ids) {
  if (on_device_) return on_device_->add(ids, layer_idx * num_experts_, num_experts_);
  const int32_t* id = ids.as<int32_t>();
  std::atomic<int64_t>* counts = counts_.data() + layer_idx * num_experts_;
  for (int64_t i = 0; i < ids.num_elements(); ++i)
    counts[id[i]].fetch_add(1, std::memory_order_relaxed);
}

void ExpertLoads::leave_device() {
  const std::lock_guard lock(device_mutex_);
  steps_ = nullptr;
  if (!on_device_) return;
  for (size_t i = 0; i < counts_.size(); ++i)
    counts_[i].fetch_add(on_device_->count(static_cast<int64_t>(i)), std::memory_order_relaxed);
  on_device_.reset();
}

int64_t ExpertLoads::count(size_t i) const {
  const int64_t on_host = counts_[i].load(std::memory_order_relaxed);
  return on_device_ ? on_host + on_device_->count(static_cast<int64_t>(i)) : on_host;
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

std::shared_ptr<ExpertLoads> make_expert_loads(const ModelConfig& config, DeviceSteps* steps) {
  return config.experts.num_experts == 0 ? nullptr : std::make_shared<ExpertLoads>(config, steps);
}

}  // namespace llmserve
