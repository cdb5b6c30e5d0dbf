#include "speculation/draft_tree.h"

#include <algorithm>
#include <cmath>

namespace llmserve {
namespace {

// Ends of the distances that are told apart: a draft that is as good as the demo's is wrong by half
// a logit on average.
constexpr std::array kEnds{0.1f, 0.25f, 0.5f, 1.0f, 1.75f, 3.0f, 5.0f};
// What the guess from the distance alone counts for, and after how many tries half is forgotten.
constexpr double kPriorTries = 8;
constexpr double kMaxTries = 256;

// By what a distance of two choices means where nothing is known: no distance, no preference.
double prior_rate(float distance, int32_t rank) {
  const double wrong = 0.5 * std::exp(-static_cast<double>(distance));
  return rank == 0 ? 0.95 * (1 - wrong) : 0.7 * wrong * std::exp2(1 - rank);
}

}  // namespace

size_t ChoiceRates::place_of(float distance) {
  return static_cast<size_t>(std::ranges::upper_bound(kEnds, distance) - kEnds.begin());
}

void ChoiceRates::add(float distance, int32_t rank) {
  Rates& rates = rates_[place_of(distance)];
  if (rates.num_tries >= kMaxTries) {
    rates.num_tries /= 2;
    for (double& count : rates.num_right) count /= 2;
  }
  rates.num_tries += 1;
  if (rank >= 0) rates.num_right[std::min<size_t>(static_cast<size_t>(rank), kNumRanks - 1)] += 1;
}

double ChoiceRates::rate(float distance, int32_t rank) const {
  const Rates& rates = rates_[place_of(distance)];
  const double known = rates.num_right[std::min<size_t>(static_cast<size_t>(rank), kNumRanks - 1)];
  return (known + kPriorTries * prior_rate(distance, rank)) / (rates.num_tries + kPriorTries);
}

void DraftTree::fill_survival(const ChoiceRates& rates, std::vector<double>& survival) const {
  survival.clear();
  for (const DraftNode& node : nodes) {
    const double before = node.parent < 0 ? 1 : survival[static_cast<size_t>(node.parent)];
    survival.push_back(before * rates.rate(node.distance, node.rank));
  }
}

std::vector<int32_t> DraftTree::path_to(int32_t node) const {
  std::vector<int32_t> path;
  for (; node >= 0; node = nodes[static_cast<size_t>(node)].parent)
    path.push_back(nodes[static_cast<size_t>(node)].token_id);
  std::ranges::reverse(path);
  return path;
}

int32_t DraftTree::num_wanted(const SpeculationConfig& config, int32_t node) const {
  if (config.token_tree.empty()) return config.tree_width;
  std::vector<int32_t> ranks;
  for (; node >= 0; node = nodes[static_cast<size_t>(node)].parent)
    ranks.insert(ranks.begin(), nodes[static_cast<size_t>(node)].rank);
  return static_cast<int32_t>(std::ranges::count_if(config.token_tree, [&](const auto& path) {
    return path.size() == ranks.size() + 1 && std::equal(ranks.begin(), ranks.end(), path.begin());
  }));
}

void grow_tree(DraftTree& tree, const TreeRequest& request, TreeTip& tip, bool is_own,
               std::span<const DraftChoice> choices, int32_t max_tokens,
               const std::function<bool(int32_t token_id, int32_t num_guesses)>& may_go_on,
               const std::function<void(const TreeTip&)>& give) {
  const TreeTip from = tip;
  const int32_t num_guesses = from.num_guesses + 1;
  const auto wanted = static_cast<size_t>(tree.num_wanted(request.config, from.node));
  for (size_t i = 0; i < std::min(choices.size(), wanted); ++i) {
    const auto rank = static_cast<int32_t>(i);
    const bool is_tip = is_own && rank == 0;
    if (std::ssize(tree.nodes) >= kMaxTreeSize && !is_tip) return;
    const DraftChoice& choice = choices[i];
    const TreeTip grown{.node = static_cast<int32_t>(tree.nodes.size()),
                        .num_guesses = num_guesses,
                        .survival = from.survival * request.rates.rate(choice.distance, rank)};
    tree.nodes.push_back({.parent = from.node,
                          .token_id = choice.token_id,
                          .rank = rank,
                          .distance = choice.distance});
    if (is_tip) {
      tip = grown;
    } else if (num_guesses < max_tokens && grown.survival >= request.min_survival &&
               tree.num_wanted(request.config, grown.node) > 0 &&
               may_go_on(choice.token_id, num_guesses)) {
      give(grown);
    }
  }
}

void DraftTree::note_drawn(std::span<const int32_t> drawn, ChoiceRates& rates) const {
  int32_t parent = -1;
  for (const int32_t token_id : drawn) {
    int32_t next = -1;
    float distance = -1;
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].parent != parent) continue;
      distance = nodes[i].distance;
      if (nodes[i].token_id == token_id) next = static_cast<int32_t>(i);
    }
    if (distance < 0) return;  // nothing was guessed behind it
    rates.add(distance, next < 0 ? -1 : nodes[static_cast<size_t>(next)].rank);
    if (next < 0) return;
    parent = next;
  }
}

}  // namespace llmserve
