// Named stretches of a thread's time for a profiler, if one looks on.
#pragma once

namespace llmserve {

// Where ranges go. Plain C, since the functions are another library's: a device's backend has one.
struct RangeSink {
  void (*push)(const char* name) = nullptr;
  void (*pop)() = nullptr;
};

// For the whole process, and the sink's life is; none: ranges cost a load.
void set_range_sink(const RangeSink* sink);

// A stretch from here to the end of the scope. `name` is a literal.
class TraceRange {
 public:
  explicit TraceRange(const char* name);
  ~TraceRange();
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;

 private:
  const RangeSink* sink_;  // as it was at the beginning
};

}  // namespace llmserve
