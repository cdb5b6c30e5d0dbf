#include "scheduler/policies/batch_window.h"
#include "scheduler/policies/policies.h"

namespace llmserve {
namespace {

// Starts a batch when it is full or its oldest member has waited max_batch_delay_us.
class DynamicPolicy final : public SchedulingPolicy {
 public:
  explicit DynamicPolicy(const SchedulerConfig& config)
      : max_delay_us_(config.max_batch_delay_us), window_(config.max_num_seqs) {}

  int32_t num_admissible(const QueueState& queue) override {
    if (queue.num_newcomers == 0) return 0;
    const bool is_due = queue.now_us >= wake_us(queue);
    if (window_.is_over(queue) && (window_.is_full(queue) || is_due)) window_.start(queue);
    return window_.num_absent(queue);
  }
  void on_admitted() override { window_.on_admitted(); }
  int64_t wake_us(const QueueState& queue) const override {
    return queue.oldest_arrival_us + max_delay_us_;
  }

 private:
  const int64_t max_delay_us_;
  BatchWindow window_;
};

}  // namespace

std::unique_ptr<SchedulingPolicy> make_dynamic_policy(const SchedulerConfig& config) {
  return std::make_unique<DynamicPolicy>(config);
}

}  // namespace llmserve
