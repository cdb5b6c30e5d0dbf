// A policy that uses every question and hook of SchedulingPolicy: the tenant that has been given
// the fewest tokens is served first, and whoever has computed the least gives its blocks back
// first. For tests of the scheduler with keys that change.
#pragma once

#include <map>
#include <string>

#include "scheduler/policy.h"

namespace llmserve {

class FairPolicy final : public SchedulingPolicy {
 public:
  int64_t service_key(const Request& request) const override {
    const auto served = num_served_.find(request.tenant);
    return served == num_served_.end() ? 0 : served->second;
  }
  bool keys_change() const override { return true; }
  int64_t victim_key(const Victim& victim) const override { return -victim.num_computed; }

  void on_admitted(const Request& request) override {
    num_served_[request.tenant] += static_cast<int64_t>(request.prompt_token_ids.size());
    ++num_running_[request.tenant];
  }
  void on_tokens(const Request& request, int32_t num_tokens) override {
    num_served_[request.tenant] += num_tokens;
  }
  void on_finished(const Request& request) override { --num_running_[request.tenant]; }

  const std::map<std::string, int64_t>& num_served() const { return num_served_; }
  const std::map<std::string, int64_t>& num_running() const { return num_running_; }

 private:
  std::map<std::string, int64_t> num_served_;   // tokens, prompts included
  std::map<std::string, int64_t> num_running_;  // requests admitted and not finished
};

}  // namespace llmserve
