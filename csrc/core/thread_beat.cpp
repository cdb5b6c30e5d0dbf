#include "core/thread_beat.h"

#include <pthread.h>

namespace llmserve {
namespace {

thread_local ThreadBeat* own_beat = nullptr;

}  // namespace

int64_t ThreadBeat::cpu_us() const {
  timespec time{};
  if (clock_gettime(cpu_clock, &time) != 0) return 0;
  return int64_t{time.tv_sec} * 1'000'000 + time.tv_nsec / 1000;
}

BeatScope::BeatScope(ThreadBeat& beat) : outer_(own_beat) {
  clockid_t clock = 0;
  if (pthread_getcpuclockid(pthread_self(), &clock) == 0) beat.cpu_clock = clock;
  own_beat = &beat;
}

BeatScope::~BeatScope() { own_beat = outer_; }

void beat(const char* op) {
  ThreadBeat* const beat = own_beat;
  if (beat == nullptr) return;
  beat->op.store(op, std::memory_order_relaxed);
  beat->num_ops.fetch_add(1, std::memory_order_relaxed);
}

BeatPause::BeatPause()
    : beat_(own_beat), was_paused_(beat_ != nullptr && beat_->is_paused.exchange(true)) {}

BeatPause::~BeatPause() {
  if (beat_ != nullptr) beat_->is_paused = was_paused_;
}

}  // namespace llmserve
