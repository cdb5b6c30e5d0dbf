#include "routing/router_policy.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <tuple>

#include "core/error.h"

namespace llmserve {
namespace {

// Of equal costs the fewest requests, then who was chosen least often, then the lower number.
auto order_of(const Candidate& x) {
  return std::tuple(x.cost, x.num_requests, x.num_routed, x.replica);
}

size_t choose_cheapest(std::span<const Candidate> candidates, RouterDraws&) {
  const auto best = std::min_element(
      candidates.begin(), candidates.end(),
      [](const Candidate& a, const Candidate& b) { return order_of(a) < order_of(b); });
  return static_cast<size_t>(best - candidates.begin());
}

// Two drawn at random need not all be looked at, and do not all go where one looks best.
size_t choose_of_two(std::span<const Candidate> candidates, RouterDraws& draws) {
  const size_t first = draws.below(candidates.size());
  if (candidates.size() == 1) return first;
  const size_t second = (first + 1 + draws.below(candidates.size() - 1)) % candidates.size();
  return order_of(candidates[first]) < order_of(candidates[second]) ? first : second;
}

size_t choose_in_turn(std::span<const Candidate> candidates, RouterDraws&) {
  const auto next = std::min_element(
      candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
        return std::tuple(a.num_routed, a.replica) < std::tuple(b.num_routed, b.replica);
      });
  return static_cast<size_t>(next - candidates.begin());
}

constexpr std::array kPolicies{
    RouterPolicy{"prefix", "the least work, a cached prefix counted as saved", &choose_cheapest},
    RouterPolicy{"power_of_two", "the better of two drawn at random", &choose_of_two},
    RouterPolicy{"round_robin", "one after another", &choose_in_turn},
};

}  // namespace

size_t RouterDraws::below(size_t size) {
  // SplitMix64 (Steele et al. 2014); the bias of the remainder is below size / 2^64.
  state_ += 0x9e3779b97f4a7c15u;
  uint64_t x = state_;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<size_t>((x ^ (x >> 31)) % size);
}

std::span<const RouterPolicy> router_policy_registry() { return kPolicies; }

const RouterPolicy& find_router_policy(std::string_view name) {
  std::ostringstream names;
  for (const RouterPolicy& policy : kPolicies) {
    if (policy.name == name) return policy;
    names << (names.tellp() > 0 ? ", " : "") << policy.name;
  }
  throw InvalidArgument(concat("policy must be one of ", names.str(), "; got \"", name, '"'));
}

}  // namespace llmserve
