// A device's queue of work, for libraries that add to it.
#pragma once

#include <functional>

namespace llmserve {

struct DeviceQueue {
  void* stream = nullptr;  // a cudaStream_t
  // Whether all that was asked for so far is done. Never waits. Throws DeviceError if it failed.
  std::function<bool()> is_done;
};

}  // namespace llmserve
