#include "scheduler/policies/policies.h"

namespace llmserve {
namespace {

// Who runs already is not preempted for a newcomer of a better key, only when blocks run out.
class PriorityPolicy final : public SchedulingPolicy {
 public:
  int64_t service_key(const Request& request) const override { return request.priority; }
};

}  // namespace

std::unique_ptr<SchedulingPolicy> make_priority_policy(const SchedulerConfig&) {
  return std::make_unique<PriorityPolicy>();
}

}  // namespace llmserve
