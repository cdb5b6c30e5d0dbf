#include "scheduler/policies/batch_window.h"
#include "scheduler/policies/policies.h"

namespace llmserve {
namespace {

// Starts a batch when it is full, or when nothing has arrived since the last step asked: whoever
// comes may bring more, and a queue that stands still will not fill up.
class StaticPolicy final : public SchedulingPolicy {
 public:
  explicit StaticPolicy(const SchedulerConfig& config) : window_(config.max_num_seqs) {}

  int32_t num_admissible(const QueueState& queue) override {
    const bool is_quiet = queue.num_requests == num_requests_seen_;
    num_requests_seen_ = queue.num_requests;
    if (window_.is_over(queue) && (window_.is_full(queue) || is_quiet)) window_.start(queue);
    return window_.num_absent(queue);
  }
  void on_admitted(const Request&) override { window_.on_admitted(); }
  int64_t wake_us(const QueueState& queue) const override { return queue.now_us; }

 private:
  BatchWindow window_;
  int64_t num_requests_seen_ = 0;
};

}  // namespace

std::unique_ptr<SchedulingPolicy> make_static_policy(const SchedulerConfig& config) {
  return std::make_unique<StaticPolicy>(config);
}

}  // namespace llmserve
