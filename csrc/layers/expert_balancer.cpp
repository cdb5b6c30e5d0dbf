#include "layers/expert_balancer.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {

ExpertBalancer::ExpertBalancer(const ExpertBalanceOptions& options, int64_t num_layers,
                               int64_t num_experts, int32_t num_ranks)
    : options_(options),
      num_experts_(num_experts),
      num_ranks_(num_ranks),
      layers_(static_cast<size_t>(num_layers)) {
  options.validate();
  const int64_t most = num_experts * (num_ranks - 1);
  if (options.num_redundant_experts > most)
    throw InvalidArgument(concat("eplb_config: num_redundant_experts: expected at most ", most,
                                 ", a copy of each of ", num_experts, " experts on every other of ",
                                 num_ranks, " ranks, got ", options.num_redundant_experts));
}

void ExpertBalancer::link(std::span<const std::vector<RankExperts>> ranks) {
  std::vector<const ExpertLinear*> of_ranks(ranks.size());
  for (size_t i = 0; i < ranks[0].size(); ++i) {
    const auto join = [&](const ExpertLinear* RankExperts::* product) {
      for (size_t rank = 0; rank < ranks.size(); ++rank) of_ranks[rank] = ranks[rank][i].*product;
      return ExpertLinear::join(of_ranks);
    };
    std::unique_ptr<Layer>& layer = layers_[static_cast<size_t>(ranks[0][i].layer_idx)];
    if (!layer)
      layer = std::make_unique<Layer>(
          Layer{.homes = ExpertHomes(num_experts_, num_ranks_),
                .loads = std::vector<int64_t>(static_cast<size_t>(num_experts_)),
                .rank_rows = std::vector<std::atomic<int64_t>>(static_cast<size_t>(num_ranks_))});
    layer->gate_up = join(&RankExperts::gate_up);
    layer->down = join(&RankExperts::down);
  }
}

// The last steps of an interval count, and the step after them runs with what they say.
void ExpertBalancer::begin_step() {
  const int64_t interval = options_.step_interval;
  if (interval == 0) return;
  const int64_t step = num_steps_++ % interval;
  is_counting_ = step >= interval - options_.window_size;
  if (step != 0 || num_steps_ == 1) return;
  for (const std::unique_ptr<Layer>& layer : layers_) {
    if (!layer) continue;
    layer->homes = layer->homes.packed(layer->loads, options_.num_redundant_experts);
    std::ranges::fill(layer->loads, 0);
  }
  num_packings_.fetch_add(1, std::memory_order_relaxed);
}

std::vector<ExpertBalancer::RankRows> ExpertBalancer::rank_rows() const {
  std::vector<RankRows> rows;
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (!layers_[i]) continue;
    RankRows& of = rows.emplace_back(RankRows{.layer_idx = static_cast<int64_t>(i)});
    for (const std::atomic<int64_t>& count : layers_[i]->rank_rows)
      of.rows.push_back(count.load(std::memory_order_relaxed));
  }
  return rows;
}

void RankRoutes::see(int64_t layer_idx, const ConstTensor& ids) {
  if (next_ != nullptr) next_->see(layer_idx, ids);
  if (rank_ != 0 || !balancer_->is_counting()) return;
  std::vector<int64_t>& loads = balancer_->layer(layer_idx).loads;
  for (int64_t i = 0; i < ids.num_elements(); ++i)
    ++loads[static_cast<size_t>(ids.as<int32_t>()[i])];
}

std::span<const int32_t> RankRoutes::assign(int64_t layer_idx, const ConstTensor& ids) {
  ExpertBalancer::Layer& layer = balancer_->layer(layer_idx);
  const std::span<const int32_t> ranks =
      assigner_.assign({ids.as<int32_t>(), static_cast<size_t>(ids.num_elements())}, layer.homes,
                       balancer_->capacity_factor());
  layer.rank_rows[static_cast<size_t>(rank_)].fetch_add(std::ranges::count(ranks, rank_),
                                                        std::memory_order_relaxed);
  return ranks;
}

}  // namespace llmserve
