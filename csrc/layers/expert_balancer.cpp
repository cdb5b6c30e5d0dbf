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

void ExpertBalancer::link_devices(CountRows count_rows) {
  const std::lock_guard lock(counts_mutex_);
  count_rows_ = std::move(count_rows);
  for (auto& [layer_idx, rows] : count_rows_()) {
    std::unique_ptr<Layer>& layer = layers_[static_cast<size_t>(layer_idx)];
    ExpertHomes homes(num_experts_, num_ranks_);
    if (!layer)
      layer = std::make_unique<Layer>(
          Layer{.homes = homes,
                .loads = std::vector<int64_t>(static_cast<size_t>(num_experts_)),
                .seen = rows,
                .rank_rows = std::vector<std::atomic<int64_t>>(static_cast<size_t>(num_ranks_))});
    layer->places.emplace(homes);
    layer->homes = std::move(homes);
  }
}

// The last steps of an interval count, and the step after them runs with what they say. Devices
// count all steps, and a little late.
bool ExpertBalancer::begin_step() {
  const int64_t interval = options_.step_interval;
  if (interval == 0) return false;
  const int64_t step = num_steps_++ % interval;
  const bool is_packed = step == 0 && num_steps_ > 1;
  if (!count_rows_) {
    is_counting_ = step >= interval - options_.window_size;
  } else if (is_packed || step == interval - options_.window_size) {
    const std::lock_guard lock(counts_mutex_);
    take_counts();
    if (!is_packed)
      for (const auto& layer : layers_)
        if (layer) std::ranges::fill(layer->loads, 0);
  }
  if (!is_packed) return false;
  const std::lock_guard lock(counts_mutex_);
  for (const std::unique_ptr<Layer>& layer : layers_) {
    if (!layer) continue;
    const std::span<const int64_t> room =
        layer->places ? layer->places->room() : std::span<const int64_t>();
    layer->homes = layer->homes.packed(layer->loads, options_.num_redundant_experts, room);
    std::ranges::fill(layer->loads, 0);
  }
  num_packings_.fetch_add(1, std::memory_order_relaxed);
  return count_rows_ != nullptr;
}

std::vector<ExpertBalancer::Moves> ExpertBalancer::move() {
  std::vector<Moves> all;
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (!layers_[i]) continue;
    std::vector<ExpertMove> moves = layers_[i]->places->arrange(layers_[i]->homes);
    if (!moves.empty()) all.push_back({static_cast<int64_t>(i), std::move(moves)});
  }
  return all;
}

std::vector<int32_t> ExpertBalancer::homes_of(int32_t rank) const {
  const size_t of_layer = static_cast<size_t>(3 * num_experts_);
  std::vector<int32_t> table(layers_.size() * of_layer);
  for (size_t i = 0; i < layers_.size(); ++i)
    if (layers_[i])
      layers_[i]->places->write(layers_[i]->homes, rank,
                                std::span(table).subspan(i * of_layer, of_layer));
  return table;
}

// The loads lack what was counted before the window, and counts that were begun anew give nothing.
void ExpertBalancer::take_counts() const {
  for (const auto& [layer_idx, rows] : count_rows_()) {
    Layer& layer = *layers_[static_cast<size_t>(layer_idx)];
    count_rank_rows(layer, rows);
    for (size_t e = 0; e < rows.size(); ++e)
      layer.loads[e] += std::max<int64_t>(0, rows[e] - layer.seen[e]);
    layer.seen = rows;
  }
}

// Copies of an expert have equal shares.
void ExpertBalancer::count_rank_rows(Layer& layer, std::span<const int64_t> rows) const {
  for (size_t e = 0; e < rows.size(); ++e) {
    const int64_t more = std::max<int64_t>(0, rows[e] - layer.seen[e]);
    const std::span<const int32_t> ranks = layer.homes.of(static_cast<int64_t>(e));
    const auto n = std::ssize(ranks);
    for (int64_t i = 0; i < n; ++i)
      layer.rank_rows[static_cast<size_t>(ranks[static_cast<size_t>(i)])] +=
          more * (i + 1) / n - more * i / n;
  }
}

std::vector<ExpertBalancer::RankRows> ExpertBalancer::rank_rows() const {
  const std::lock_guard lock(counts_mutex_);
  if (count_rows_) take_counts();
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

void RankRoutes::bring_homes(Memory& memory) {
  const std::vector<int32_t> table = balancer_->homes_of(rank_);
  const auto num_bytes = static_cast<int64_t>(table.size() * sizeof(int32_t));
  if (homes_.data() == nullptr) homes_ = Buffer(num_bytes, memory);
  memory.copy_from_host(homes_.data(), table.data(), num_bytes);
}

ConstTensor RankRoutes::homes(int64_t layer_idx) const {
  const int64_t n = balancer_->num_experts();
  return {reinterpret_cast<const int32_t*>(homes_.data()) + layer_idx * 3 * n, DType::kI32, {n, 3}};
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
