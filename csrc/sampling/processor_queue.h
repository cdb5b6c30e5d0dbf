// Hands rows to a thread that is not the engine's, where processing them needs a lock that the
// engine never takes: Python's. The engine's thread waits for each row, and stops waiting when the
// request is aborted or the queue closed; a row is its job's own memory, so that whoever works on
// it may be late.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "sampling/logits_processor.h"

namespace llmserve {

// A row to process, or word that no more rows will come with this key. The fields are the worker's
// between take() and finish().
struct ProcessorJob {
  int64_t key = 0;                 // whose processors: what make_processor() was given
  bool is_release = false;         // the processor is gone; not to be finished
  std::vector<int32_t> token_ids;  // [position]
  std::vector<float> logits;       // [V], to be changed in place
};

class ProcessorQueue : public std::enable_shared_from_this<ProcessorQueue> {
 public:
  // A processor whose rows come out of take() with this key. It keeps the queue alive.
  std::shared_ptr<LogitsProcessor> make_processor(int64_t key);

  // For the worker: the next row, waiting for it; null once closed.
  std::shared_ptr<ProcessorJob> take();
  // The row is done, or failed for this reason. False if nobody waited any more.
  bool finish(const ProcessorJob& job, const std::string& error);
  // Rows that workers have taken and not finished.
  int64_t num_taken() const;

  // Every process() that waits, now or later, throws; take() gives null. Idempotent.
  void close();

 private:
  friend class QueuedProcessor;
  enum class State : uint8_t { kQueued, kTaken, kDone };
  struct Entry {
    std::shared_ptr<ProcessorJob> job;
    State state = State::kQueued;
    std::string error;
  };

  void run(int64_t key, const bool& is_cancelled, std::span<const int32_t> token_ids,
           std::span<float> logits);
  void cancel(bool& is_cancelled);
  void release(int64_t key);

  mutable std::mutex mutex_;
  std::condition_variable has_work_;
  std::condition_variable has_result_;
  std::deque<Entry> entries_;  // few: the row that the engine's thread waits for, and releases
  int64_t num_taken_ = 0;
  bool is_closed_ = false;
};

}  // namespace llmserve
