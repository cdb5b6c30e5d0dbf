// How one of several replicas is chosen: one row a policy.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace llmserve {

// A replica that has room for the request.
struct Candidate {
  int32_t replica = 0;
  int64_t num_cached_tokens = 0;
  double cost = 0.0;         // of all work there once the request is
  int64_t num_requests = 0;  // under way
  int64_t num_routed = 0;    // of all time
};

// Numbers that follow from a seed.
class RouterDraws {
 public:
  explicit RouterDraws(uint64_t seed) : state_(seed) {}
  // In [0, size).
  size_t below(size_t size);

 private:
  uint64_t state_;
};

struct RouterPolicy {
  std::string_view name;
  std::string_view summary;
  // An index into candidates, of which there is at least one.
  size_t (*choose)(std::span<const Candidate> candidates, RouterDraws& draws);
};
std::span<const RouterPolicy> router_policy_registry();

// Throws InvalidArgument that lists the names.
const RouterPolicy& find_router_policy(std::string_view name);

}  // namespace llmserve
