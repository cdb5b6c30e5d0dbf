#include "layers/expert_placement.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "layers/weight_parts.h"

namespace llmserve {
namespace {

// Above the mean, up to which a rank keeps what it has in blocks: moving an expert gains less then
// than reading its weights from another rank's memory costs.
constexpr double kSlack = 1.05;

}  // namespace

void ExpertBalanceOptions::validate() const {
  const auto at_least = [](const char* name, int64_t value, int64_t least) {
    if (value < least)
      throw InvalidArgument(
          concat("eplb_config: ", name, ": expected at least ", least, ", got ", value));
  };
  at_least("window_size", window_size, 1);
  at_least("step_interval", step_interval, 0);
  at_least("num_redundant_experts", num_redundant_experts, 0);
  if (step_interval > 0 && window_size > step_interval)
    throw InvalidArgument(concat("eplb_config: window_size: expected at most step_interval, ",
                                 step_interval, ", got ", window_size));
  if (num_redundant_experts > 0 && step_interval == 0)
    throw InvalidArgument(
        "eplb_config: num_redundant_experts: expected a step_interval above 0, at which the "
        "busiest experts are found");
  if (capacity_factor != 0 && !(capacity_factor >= 1.0 && std::isfinite(capacity_factor)))
    throw InvalidArgument(
        concat("eplb_config: capacity_factor: expected at least 1, got ", capacity_factor));
}

ExpertHomes::ExpertHomes(int64_t num_experts, int32_t num_ranks) : num_ranks_(num_ranks) {
  Shard shard{.size = num_ranks};
  for (; shard.rank < shard.size; ++shard.rank)
    copies_.insert(copies_.end(), static_cast<size_t>(shard.of(num_experts).size), {shard.rank});
}

int32_t ExpertHomes::block_of(int64_t expert) const {
  Shard shard{.size = num_ranks_};
  for (; shard.rank < shard.size; ++shard.rank) {
    const IndexRange range = shard.of(num_experts());
    if (expert < range.begin + range.size) break;
  }
  return shard.rank;
}

ExpertHomes ExpertHomes::packed(std::span<const int64_t> loads, int64_t num_redundant,
                                std::span<const int64_t> room) const {
  const size_t n = copies_.size();
  std::vector<int64_t> num_copies(n, 1);
  const auto share = [&](int64_t expert) {
    const auto i = static_cast<size_t>(expert);
    return static_cast<double>(loads[i]) / static_cast<double>(num_copies[i]);
  };
  for (int64_t more = 0; more < num_redundant; ++more) {
    int64_t busiest = -1;
    for (int64_t e = 0; e < num_experts(); ++e)
      if (num_copies[static_cast<size_t>(e)] < num_ranks_ &&
          (busiest < 0 || share(e) > share(busiest)))
        busiest = e;
    if (busiest < 0) break;  // all run everywhere
    ++num_copies[static_cast<size_t>(busiest)];
  }
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return share(a) > share(b); });

  ExpertHomes to = *this;
  const double mean = static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0})) /
                      static_cast<double>(num_ranks_);
  std::vector<double> rows(static_cast<size_t>(num_ranks_));
  std::vector<int64_t> left(room.begin(), room.end());
  const auto has_room = [&](int32_t rank) {
    return left.empty() || left[static_cast<size_t>(rank)] > 0;
  };
  for (const int64_t expert : order) {
    std::vector<int32_t>& ranks = to.copies_[static_cast<size_t>(expert)];
    ranks.clear();
    const int32_t block = block_of(expert);
    if (has_room(block) && rows[static_cast<size_t>(block)] + share(expert) <= kSlack * mean)
      ranks.push_back(block);
    while (std::ssize(ranks) < num_copies[static_cast<size_t>(expert)]) {
      int32_t best = -1;
      for (int32_t rank = 0; rank < num_ranks_; ++rank)
        if (has_room(rank) && std::ranges::find(ranks, rank) == ranks.end() &&
            (best < 0 || rows[static_cast<size_t>(rank)] < rows[static_cast<size_t>(best)]))
          best = rank;
      if (best < 0) break;
      ranks.push_back(best);
    }
    check_internal(!ranks.empty(), "there is room for all experts");
    for (const int32_t rank : ranks) {
      rows[static_cast<size_t>(rank)] += share(expert);
      if (!left.empty()) --left[static_cast<size_t>(rank)];
    }
  }
  return to;
}

ExpertPlaces::ExpertPlaces(const ExpertHomes& blocks)
    : experts_(static_cast<size_t>(blocks.num_ranks())) {
  for (int64_t expert = 0; expert < blocks.num_experts(); ++expert)
    experts_[static_cast<size_t>(blocks.of(expert)[0])].push_back(expert);
  for (const std::vector<int64_t>& experts : experts_) room_.push_back(std::ssize(experts));
}

std::vector<ExpertMove> ExpertPlaces::arrange(const ExpertHomes& homes) {
  const std::vector<std::vector<int64_t>> before = experts_;
  const auto source = [&](int64_t expert) {
    for (size_t rank = 0;; ++rank) {
      const auto found = std::ranges::find(before[rank], expert);
      if (found != before[rank].end())
        return ExpertMove{.from_rank = static_cast<int32_t>(rank),
                          .from_place = static_cast<int32_t>(found - before[rank].begin())};
    }
  };
  std::vector<ExpertMove> moves;
  for (size_t rank = 0; rank < experts_.size(); ++rank) {
    std::vector<int64_t>& here = experts_[rank];
    std::vector<bool> is_free(here.size(), true);
    std::vector<int64_t> coming;
    for (int64_t expert = 0; expert < homes.num_experts(); ++expert) {
      if (std::ranges::find(homes.of(expert), static_cast<int32_t>(rank)) == homes.of(expert).end())
        continue;
      const auto found = std::ranges::find(here, expert);
      if (found == here.end())
        coming.push_back(expert);
      else
        is_free[static_cast<size_t>(found - here.begin())] = false;
    }
    size_t place = 0;
    for (const int64_t expert : coming) {
      while (!is_free[place]) ++place;
      ExpertMove move = source(expert);
      move.to_rank = static_cast<int32_t>(rank);
      move.to_place = static_cast<int32_t>(place);
      moves.push_back(move);
      here[place++] = expert;
    }
  }
  return moves;
}

void ExpertPlaces::write(const ExpertHomes& homes, int32_t rank, std::span<int32_t> table) const {
  const std::vector<int64_t>& here = experts_[static_cast<size_t>(rank)];
  for (int64_t expert = 0; expert < homes.num_experts(); ++expert) {
    const std::span<const int32_t> ranks = homes.of(expert);
    const auto copy = std::ranges::find(ranks, rank);
    const bool is_here = copy != ranks.end();
    int32_t* const row = table.data() + 3 * expert;
    row[0] = static_cast<int32_t>(std::ssize(ranks));
    row[1] = is_here ? static_cast<int32_t>(copy - ranks.begin()) : -1;
    row[2] = is_here ? static_cast<int32_t>(std::ranges::find(here, expert) - here.begin()) : -1;
  }
}

int64_t expert_capacity(int64_t num_experts, int64_t num_rows, double factor) {
  const double wanted = static_cast<double>(num_rows) * factor;
  auto rows = static_cast<int64_t>(wanted / static_cast<double>(num_experts));
  if (static_cast<double>(rows * num_experts) < wanted) ++rows;
  return std::max(rows, kMinExpertRows);
}

void RowAssigner::add_part(int64_t expert, int32_t rank, int64_t num_rows) {
  if (num_rows == 0) return;
  const auto e = static_cast<size_t>(expert);
  const auto place = static_cast<int32_t>(parts_.size());
  parts_.push_back({.rank = rank, .num_rows = num_rows});
  (first_[e] < 0 ? first_[e] : parts_[static_cast<size_t>(last_[e])].next) = place;
  last_[e] = place;
  of_rank_[static_cast<size_t>(rank)] += num_rows;
  counts_[e] -= num_rows;
}

std::span<const int32_t> RowAssigner::assign(std::span<const int32_t> ids, const ExpertHomes& homes,
                                             double factor) {
  const auto n = static_cast<size_t>(homes.num_experts());
  const auto num_rows = static_cast<int64_t>(ids.size());
  const int64_t capacity =
      factor == 0 ? num_rows : expert_capacity(homes.num_experts(), num_rows, factor);
  counts_.assign(n, 0);
  first_.assign(n, -1);
  last_.assign(n, -1);
  of_rank_.assign(static_cast<size_t>(homes.num_ranks()), 0);
  parts_.clear();
  crowded_.clear();
  for (const int32_t id : ids) ++counts_[static_cast<size_t>(id)];
  for (int64_t e = 0; e < homes.num_experts(); ++e) {
    const int64_t rows = counts_[static_cast<size_t>(e)];
    const std::span<const int32_t> copies = homes.of(e);
    const int64_t num_copies = std::ssize(copies);
    for (int64_t i = 0; i < num_copies; ++i)
      add_part(e, copies[static_cast<size_t>(i)],
               std::min(rows * (i + 1) / num_copies - rows * i / num_copies, capacity));
    if (counts_[static_cast<size_t>(e)] > 0) crowded_.push_back(e);
  }
  const auto excess = [&](int64_t e) { return counts_[static_cast<size_t>(e)]; };
  std::ranges::stable_sort(crowded_, [&](int64_t a, int64_t b) { return excess(a) > excess(b); });
  for (const int64_t e : crowded_)
    while (excess(e) > 0)
      add_part(e, static_cast<int32_t>(std::ranges::min_element(of_rank_) - of_rank_.begin()),
               std::min(excess(e), capacity));

  ranks_.resize(ids.size());
  for (size_t r = 0; r < ids.size(); ++r) {
    int32_t& first = first_[static_cast<size_t>(ids[r])];
    Part& part = parts_[static_cast<size_t>(first)];
    ranks_[r] = part.rank;
    if (--part.num_rows == 0) first = part.next;
  }
  return ranks_;
}

}  // namespace llmserve
