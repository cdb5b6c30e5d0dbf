#include "engine/expert_loads.h"

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
  for (std::atomic<int64_t>& count : counts_) count.store(0, std::memory_order_relaxed);
  is_counting_.store(true, std::memory_order_relaxed);
}

void ExpertLoads::see(int64_t layer_idx, const ConstTensor& ids) {
  const int32_t* id = ids.as<int32_t>();
  std::atomic<int64_t>* counts = counts_.data() + layer_idx * num_experts_;
  for (int64_t i = 0; i < ids.num_elements(); ++i)
    counts[id[i]].fetch_add(1, std::memory_order_relaxed);
}

std::vector<ExpertLoads::Layer> ExpertLoads::layers() const {
  std::vector<Layer> layers;
  if (!is_counting()) return layers;
  for (const int64_t layer_idx : expert_layers_) {
    Layer& layer = layers.emplace_back(Layer{.layer_idx = layer_idx});
    for (int64_t expert = 0; expert < num_experts_; ++expert)
      layer.rows.push_back(counts_[static_cast<size_t>(layer_idx * num_experts_ + expert)].load(
          std::memory_order_relaxed));
  }
  return layers;
}

std::shared_ptr<ExpertLoads> make_expert_loads(const ModelConfig& config) {
  return config.experts.num_experts == 0 ? nullptr : std::make_shared<ExpertLoads>(config);
}

}  // namespace llmserve
