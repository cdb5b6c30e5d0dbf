// A scheduling policy answers three questions: who is served first, who gives its blocks back first
// where the pool is full, and how many newcomers a step may admit. What fits and what runs in a
// step is the scheduler's and the same for all.
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

// A running sequence that may have to give its blocks back.
struct Victim {
  const Request* request = nullptr;
  int64_t num_computed = 0;  // tokens to be computed again
  int32_t num_blocks = 0;    // of each cache group
};

class SchedulingPolicy {
 public:
  static constexpr int32_t kUnlimited = std::numeric_limits<int32_t>::max();
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  virtual ~SchedulingPolicy() = default;

  // Who is served first: lower keys first, equal keys in the order of arrival. A request gets its
  // key when it arrives. Where keys_change(), it gets a new one before each step.
  virtual int64_t service_key(const Request& /*request*/) const { return 0; }
  virtual bool keys_change() const { return false; }

  // Who gives blocks back first: the highest key, of equal keys the last in the order of service.
  // Asked of running sequences that are not in the step yet.
  virtual int64_t victim_key(const Victim& /*victim*/) const { return 0; }

  // How many newcomers this step may admit. Called once a step.
  virtual int32_t num_admissible(const QueueState& /*queue*/) { return kUnlimited; }
  // When num_admissible() may turn from 0 to more though nothing else happens; kNever: it will not.
  virtual int64_t wake_us(const QueueState& /*queue*/) const { return kNever; }

  // What has been served. A newcomer was admitted; a sequence got tokens; a request has ended.
  virtual void on_admitted(const Request& /*request*/) {}
  virtual void on_tokens(const Request& /*request*/, int32_t /*num_tokens*/) {}
  virtual void on_finished(const Request& /*request*/) {}
};

struct PolicyRow {
  std::string_view name;
  std::string_view summary;
  std::unique_ptr<SchedulingPolicy> (*make)(const SchedulerConfig& config);
  bool reads_priority =
      false;  // Request::priority; elsewhere one is refused where requests come in
};

// All policies; scheduler/registry.cpp.
std::span<const PolicyRow> scheduling_policies();
// Throws InvalidArgument that lists the names.
std::unique_ptr<SchedulingPolicy> make_policy(const SchedulerConfig& config);

}  // namespace llmserve
