// Where the scheduler reads time from: the machine, or a test or simulation that sets it.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>

namespace llmserve {

class Clock {
 public:
  virtual ~Clock() = default;
  // Microseconds since an arbitrary start; never goes back.
  virtual int64_t now_us() const = 0;
};

class SteadyClock final : public Clock {
 public:
  int64_t now_us() const override {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
  }
};

// Adds the microseconds of its life to a total.
class Stopwatch {
 public:
  explicit Stopwatch(int64_t& total_us) : total_us_(total_us), start_us_(SteadyClock().now_us()) {}
  ~Stopwatch() { total_us_ += SteadyClock().now_us() - start_us_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  int64_t& total_us_;
  const int64_t start_us_;
};

// Processor time of this thread so far.
inline int64_t thread_cpu_ns() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

// Stands still until it is told otherwise.
class ManualClock final : public Clock {
 public:
  int64_t now_us() const override { return now_us_; }
  void set_us(int64_t now_us) { now_us_ = now_us; }
  void advance_us(int64_t delta_us) { now_us_ += delta_us; }

 private:
  int64_t now_us_ = 0;
};

}  // namespace llmserve
