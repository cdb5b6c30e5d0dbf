// The scheduling policies. A new one is a file in policies/, a declaration and a row here.
#include <array>
#include <string>

#include "core/error.h"
#include "scheduler/policies/policies.h"
#include "scheduler/policy.h"

namespace llmserve {
namespace {

constexpr std::array<PolicyRow, 4> kPolicies = {{
    {"fcfs", "continuous batching, first come, first served", &make_fcfs_policy},
    {"priority", "continuous batching, lower priority values first, ties by arrival",
     &make_priority_policy, /*reads_priority=*/true},
    {"static", "fills a batch, runs it until all of it has ended; for comparison",
     &make_static_policy},
    {"dynamic",
     "like static, but starts 2 to 10 ms after the oldest arrival: later after small batches, "
     "sooner after full ones",
     &make_dynamic_policy},
}};

}  // namespace

std::span<const PolicyRow> scheduling_policies() { return kPolicies; }

std::unique_ptr<SchedulingPolicy> make_policy(const SchedulerConfig& config) {
  std::string names;
  for (const PolicyRow& row : kPolicies) {
    if (row.name == config.policy) return row.make(config);
    names += names.empty() ? "" : ", ";
    names += row.name;
  }
  throw InvalidArgument(
      concat("scheduling policy must be one of ", names, ", got '", config.policy, "'"));
}

}  // namespace llmserve
