// A scheduling policy decides who is served first and how many newcomers a step may admit. What
// fits, what is preempted and what runs in a step is the scheduler's and the same for all.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string_view>

#include "api/engine_config.h"
#include "api/request.h"

namespace llmserve {

// The queue before a step's admission. A newcomer has never run; a preempted or forked sequence
// that waits is no newcomer, it belongs to those that run.
struct QueueState {
  int64_t now_us = 0;
  int32_t num_running = 0;
  int32_t num_returning = 0;      // wait, but have run
  int32_t num_newcomers = 0;      // wait and have never run
  int64_t num_requests = 0;       // added since the start
  int64_t oldest_arrival_us = 0;  // of the newcomers; valid when there are any
};

class SchedulingPolicy {
 public:
  static constexpr int32_t kUnlimited = std::numeric_limits<int32_t>::max();
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  virtual ~SchedulingPolicy() = default;

  // Lower ranks are served first and preempted last; equal ranks in the order of arrival.
  virtual int64_t rank(const Request& request) const {
    (void)request;
    return 0;
  }
  // How many newcomers this step may admit. Called once a step.
  virtual int32_t num_admissible(const QueueState& queue) {
    (void)queue;
    return kUnlimited;
  }
  virtual void on_admitted() {}
  // When num_admissible() may turn from 0 to more though nothing else happens; kNever: it will not.
  virtual int64_t wake_us(const QueueState& queue) const {
    (void)queue;
    return kNever;
  }
};

struct PolicyRow {
  std::string_view name;
  std::string_view summary;
  std::unique_ptr<SchedulingPolicy> (*make)(const SchedulerConfig& config);
};

// All policies; scheduler/registry.cpp.
std::span<const PolicyRow> scheduling_policies();
// Throws InvalidArgument that lists the names.
std::unique_ptr<SchedulingPolicy> make_policy(const SchedulerConfig& config);

}  // namespace llmserve
