#include "scheduler/policies/policies.h"

namespace llmserve {
namespace {

// All keys are equal, so that arrival alone decides.
class FcfsPolicy final : public SchedulingPolicy {};

}  // namespace

std::unique_ptr<SchedulingPolicy> make_fcfs_policy(const SchedulerConfig&) {
  return std::make_unique<FcfsPolicy>();
}

}  // namespace llmserve
