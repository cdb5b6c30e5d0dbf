// What a rank has exchanged with other processes of late: a part of the trace.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/watched_communicator.h"
#include "core/trace_range.h"

namespace llmserve {

// Times are on the engine's clock.
struct ExchangeRecord {
  const char* name = "";  // "Gather of columns", a literal
  int32_t half = 0;       // of a step that runs in halves which one, from 1 on; 0: it runs at once
  int64_t start_us = 0;
  int64_t duration_us = 0;
};

// A ring; the oldest records go first. Any thread.
class ExchangeLog {
 public:
  void add(const ExchangeRecord& record);
  // What is still there, in the order of their ends.
  std::vector<ExchangeRecord> records() const;

 private:
  mutable std::mutex mutex_;
  std::vector<ExchangeRecord> records_;  // record i of all time is at i % its size
  size_t num_added_ = 0;
};

// Of one thread, into a log and a profiler's ranges. Null: into no log.
class LoggedExchanges final : public ExchangeWatch {
 public:
  explicit LoggedExchanges(ExchangeLog* log, int32_t half = 0) : log_(log), half_(half) {}

  void begin_exchange(const char* name) override;
  void end_exchange() noexcept override;

 private:
  ExchangeLog* const log_;
  const int32_t half_;
  const char* name_ = "";
  int64_t start_us_ = 0;
  std::optional<TraceRange> range_;
};

}  // namespace llmserve
