#include "sampling/processor_queue.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace llmserve {

class QueuedProcessor final : public LogitsProcessor {
 public:
  QueuedProcessor(std::shared_ptr<ProcessorQueue> queue, int64_t key)
      : queue_(std::move(queue)), key_(key) {}

  ~QueuedProcessor() override { queue_->release(key_); }

  void process(std::span<const int32_t> token_ids, std::span<float> logits) override {
    queue_->run(key_, is_cancelled_, token_ids, logits);
  }
  void cancel() override { queue_->cancel(is_cancelled_); }

 private:
  const std::shared_ptr<ProcessorQueue> queue_;
  const int64_t key_;
  bool is_cancelled_ = false;  // under the queue's mutex
};

std::shared_ptr<LogitsProcessor> ProcessorQueue::make_processor(int64_t key) {
  return std::make_shared<QueuedProcessor>(shared_from_this(), key);
}

void ProcessorQueue::run(int64_t key, const bool& is_cancelled, std::span<const int32_t> token_ids,
                         std::span<float> logits) {
  const auto job = std::make_shared<ProcessorJob>();
  job->key = key;
  job->token_ids.assign(token_ids.begin(), token_ids.end());
  job->logits.assign(logits.begin(), logits.end());
  std::unique_lock lock(mutex_);
  entries_.push_back({.job = job});
  has_work_.notify_one();
  const auto own = [&] { return std::ranges::find(entries_, job, &Entry::job); };
  has_result_.wait(lock,
                   [&] { return is_closed_ || is_cancelled || own()->state == State::kDone; });
  const Entry entry = *own();
  entries_.erase(own());
  if (entry.state != State::kDone) throw InvalidArgument("the logits processors were stopped");
  if (!entry.error.empty()) throw InvalidArgument(entry.error);
  std::ranges::copy(job->logits, logits.begin());
}

std::shared_ptr<ProcessorJob> ProcessorQueue::take() {
  std::unique_lock lock(mutex_);
  const auto next = [&] { return std::ranges::find(entries_, State::kQueued, &Entry::state); };
  has_work_.wait(lock, [&] { return is_closed_ || next() != entries_.end(); });
  if (is_closed_) return nullptr;
  Entry& entry = *next();
  const std::shared_ptr<ProcessorJob> job = entry.job;
  if (job->is_release) {
    entries_.erase(next());
  } else {
    entry.state = State::kTaken;
    ++num_taken_;
  }
  return job;
}

bool ProcessorQueue::finish(const ProcessorJob& job, const std::string& error) {
  const std::lock_guard lock(mutex_);
  --num_taken_;
  const auto entry = std::ranges::find(entries_, &job, [](const Entry& e) { return e.job.get(); });
  if (entry == entries_.end()) return false;
  entry->error = error;
  entry->state = State::kDone;
  has_result_.notify_all();
  return true;
}

int64_t ProcessorQueue::num_taken() const {
  const std::lock_guard lock(mutex_);
  return num_taken_;
}

void ProcessorQueue::cancel(bool& is_cancelled) {
  const std::lock_guard lock(mutex_);
  is_cancelled = true;
  has_result_.notify_all();
}

void ProcessorQueue::release(int64_t key) {
  auto job = std::make_shared<ProcessorJob>();
  job->key = key;
  job->is_release = true;
  const std::lock_guard lock(mutex_);
  if (is_closed_) return;
  entries_.push_back({.job = std::move(job)});
  has_work_.notify_one();
}

void ProcessorQueue::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  has_work_.notify_all();
  has_result_.notify_all();
}

}  // namespace llmserve
