// The makers that the registry's rows name.
#pragma once

#include <memory>

#include "scheduler/policy.h"

namespace llmserve {

std::unique_ptr<SchedulingPolicy> make_fcfs_policy(const SchedulerConfig& config);
std::unique_ptr<SchedulingPolicy> make_priority_policy(const SchedulerConfig& config);
std::unique_ptr<SchedulingPolicy> make_static_policy(const SchedulerConfig& config);
std::unique_ptr<SchedulingPolicy> make_dynamic_policy(const SchedulerConfig& config);

}  // namespace llmserve
