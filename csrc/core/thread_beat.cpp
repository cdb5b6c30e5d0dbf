#include "core/thread_beat.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <string_view>

namespace llmserve {
namespace {

thread_local ThreadBeat* own_beat = nullptr;

// A thread that gets this part of a processor's time computes, also where many want one, or reads
// weights from a disk. One that sleeps and looks up again and again gets less.
constexpr int64_t kMinBusyShare = 32;

}  // namespace

int64_t ThreadBeat::cpu_us() const {
  timespec time{};
  if (clock_gettime(cpu_clock, &time) != 0) return 0;
  return int64_t{time.tv_sec} * 1'000'000 + time.tv_nsec / 1000;
}

// The letter behind the name in parentheses, which may have any character in it: proc(5).
bool ThreadBeat::is_runnable() const {
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/self/task/%d/stat", thread_id.load());
  const int file = open(path.data(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  std::array<char, 128> text{};
  const ssize_t size = read(file, text.data(), text.size());
  close(file);
  const std::string_view found(text.data(), size > 0 ? static_cast<size_t>(size) : 0);
  const size_t end = found.rfind(") ");
  if (end == std::string_view::npos || end + 2 >= found.size()) return false;
  return found[end + 2] == 'R' || found[end + 2] == 'D';
}

BeatScope::BeatScope(ThreadBeat& beat) : is_outer_(own_beat == nullptr) {
  if (!is_outer_) return;
  clockid_t clock = 0;
  if (pthread_getcpuclockid(pthread_self(), &clock) == 0) beat.cpu_clock = clock;
  static thread_local const auto thread_id = static_cast<int>(syscall(SYS_gettid));
  beat.thread_id = thread_id;
  own_beat = &beat;
}

BeatScope::~BeatScope() {
  if (is_outer_) own_beat = nullptr;
}

const ThreadBeat& BeatScope::beat() const { return *own_beat; }

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

void StandStill::look(const ThreadBeat& beat, bool is_working,
                      std::chrono::milliseconds since_last) {
  const int64_t num_ops = beat.num_ops;
  if (!is_working || beat.is_paused || num_ops != num_ops_) {
    num_ops_ = num_ops;
    begin_cpu_us_ = cpu_us_ = beat.cpu_us();
    time_ = idle_ = {};
    return;
  }
  time_ += since_last;
  cpu_us_ = beat.cpu_us();
  if (!beat.is_runnable()) idle_ += since_last;
}

std::chrono::milliseconds StandStill::idle() const {
  const bool is_busy = cpu_us_ - begin_cpu_us_ > time_.count() * 1000 / kMinBusyShare;
  return is_busy ? std::chrono::milliseconds(0) : idle_;
}

}  // namespace llmserve
