#include "core/trace_range.h"

#include <atomic>

namespace llmserve {
namespace {

std::atomic<const RangeSink*> global_sink{nullptr};

}  // namespace

void set_range_sink(const RangeSink* sink) { global_sink.store(sink); }

TraceRange::TraceRange(const char* name) : sink_(global_sink.load()) {
  if (sink_ != nullptr) sink_->push(name);
}

TraceRange::~TraceRange() {
  if (sink_ != nullptr) sink_->pop();
}

}  // namespace llmserve
