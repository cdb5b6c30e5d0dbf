// Guesses of a sequence's next tokens where a place has several: paths that begin alike.
//
// A drafter knows how the target draws: the token of the largest log q + noise. Where its first
// choice is far ahead of its second, the target most likely draws the first; where they are close,
// it may as well be the second. So the distance says more of how likely a guess is than its place.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "api/speculation_config.h"

namespace llmserve {

// One of the tokens that a drafter drew of a row: the second is the draw without the first, and so
// on.
struct DraftChoice {
  int32_t token_id = 0;
  // By how much the first is ahead of the second, in units of logits: the same for all of a row.
  float distance = std::numeric_limits<float>::infinity();
};

struct DraftNode {
  int32_t parent = -1;  // of an earlier node; -1: behind the tokens that are certain
  int32_t token_id = 0;
  int32_t rank = 0;  // among its parent's choices
  float distance = 0;
};

// How often choices were right, by their distance and rank.
class ChoiceRates {
 public:
  // Of the choices of a row that are `distance` apart the one of this rank was drawn; -1: none of
  // them.
  void add(float distance, int32_t rank);
  // What is known of it; where little is, a guess from the distance alone.
  double rate(float distance, int32_t rank) const;

 private:
  static constexpr size_t kNumDistances = 8;
  static constexpr size_t kNumRanks = 4;  // the last stands for those behind it, too
  struct Rates {
    double num_tries = 0;
    std::array<double, kNumRanks> num_right{};
  };
  static size_t place_of(float distance);
  std::array<Rates, kNumDistances> rates_{};
};

struct DraftTree {
  std::vector<DraftNode> nodes;

  // How likely a node and all before it are right.
  void fill_survival(const ChoiceRates& rates, std::vector<double>& survival) const;
  // The tokens from the first place to the node.
  std::vector<int32_t> path_to(int32_t node) const;
  // How many choices there may be behind a node, or behind the certain tokens (-1).
  int32_t num_wanted(const SpeculationConfig& config, int32_t node) const;
  // Of each node on the way that `drawn` took: which choice was right, if one was.
  void note_drawn(std::span<const int32_t> drawn, ChoiceRates& rates) const;
};

// What a drafter is to do with a task that may have a tree.
struct TreeRequest {
  const SpeculationConfig& config;
  const ChoiceRates& rates;
  double min_survival = 0;  // what is less likely is not gone on from
};

// A path that is gone on from: its last guess is to be run.
struct TreeTip {
  int32_t node = -1;  // -1: nothing is guessed yet
  int32_t num_guesses = 0;
  double survival = 1;
};

// Adds what a row behind `tip` chose to the tree. Of a task's own path the first choice becomes the
// tip. Gives, in turn, the other tips that are likely enough to be gone on from, where
// may_go_on(token, guesses before it) and the request has guesses behind them; a task has
// max_tokens of them in a path.
void grow_tree(DraftTree& tree, const TreeRequest& request, TreeTip& tip, bool is_own,
               std::span<const DraftChoice> choices, int32_t max_tokens,
               const std::function<bool(int32_t token_id, int32_t num_guesses)>& may_go_on,
               const std::function<void(const TreeTip&)>& give);

}  // namespace llmserve
