#include <algorithm>

#include "scheduler/policies/batch_window.h"
#include "scheduler/policies/policies.h"

namespace llmserve {
namespace {

// Starts a batch when it is full or its oldest member has waited for the delay. The delay aims at
// full batches and adapts between a fifth of max_batch_delay_us and all of it (2 to 10 ms): a batch
// that came out full halves it, since arrivals are dense and waiting less fills the next one too;
// one that did not adds a tenth, so that the next one collects more. Additive steps toward larger
// batches and multiplicative ones away are Clipper's (Crankshaw et al., NSDI 2017, section 4.3),
// which adapts the size of a batch in this way; the delayed batch is its section 4.3.2.
class DynamicPolicy final : public SchedulingPolicy {
 public:
  explicit DynamicPolicy(const SchedulerConfig& config)
      : max_delay_us_(config.max_batch_delay_us),
        delay_us_(min_delay_us()),
        window_(config.max_num_seqs) {}

  int32_t num_admissible(const QueueState& queue) override {
    if (queue.num_newcomers == 0) return 0;
    const bool is_full = window_.is_full(queue);
    const bool is_due = queue.now_us >= wake_us(queue);
    if (window_.is_over(queue) && (is_full || is_due)) {
      adapt(is_full);
      window_.start(queue);
    }
    return window_.num_absent(queue);
  }
  void on_admitted(const Request&) override { window_.on_admitted(); }
  int64_t wake_us(const QueueState& queue) const override {
    return queue.oldest_arrival_us + delay_us_;
  }

 private:
  int64_t min_delay_us() const { return max_delay_us_ / 5; }
  void adapt(bool is_full) {
    delay_us_ = is_full ? std::max(min_delay_us(), delay_us_ / 2)
                        : std::min(max_delay_us_, delay_us_ + max_delay_us_ / 10);
  }

  const int64_t max_delay_us_;
  int64_t delay_us_;
  BatchWindow window_;
};

}  // namespace

std::unique_ptr<SchedulingPolicy> make_dynamic_policy(const SchedulerConfig& config) {
  return std::make_unique<DynamicPolicy>(config);
}

}  // namespace llmserve
