// A device's queue of work, for libraries that add to it.
#pragma once

#include <cstdint>
#include <functional>

namespace llmserve {

// Rows of bytes within a device's memory. Strides are in bytes.
struct RowCopy {
  void* to = nullptr;
  int64_t to_stride = 0;
  const void* from = nullptr;
  int64_t from_stride = 0;
  int64_t row_bytes = 0;
  int64_t num_rows = 0;
};

// What a queue has come to.
struct QueueProgress {
  int64_t num_marks = 0;   // that were put in
  int64_t num_passed = 0;  // of them, as far as is known
};

struct DeviceQueue {
  void* stream = nullptr;  // a cudaStream_t
  // Whether all that was asked for so far is done. Never waits. Throws DeviceError if it failed.
  std::function<bool()> is_done;
  // Adds a copy.
  std::function<void(const RowCopy&)> copy_rows;
  // Adds a mark behind what a library has added, and looks at which have been passed. Any thread
  // may look; of none who has failed is anything said.
  std::function<void()> mark;
  std::function<QueueProgress()> progress;
  // Before a library ends what it was recorded with: nothing that was recorded is launched any
  // more. Never waits for the device. Any thread.
  std::function<void()> forget;
  // Whether what is asked for is recorded at this moment, by the rank's own thread.
  std::function<bool()> is_recorded;
};

}  // namespace llmserve
