// Parts of a device's memory that go to and from the host while the device runs steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace llmserve {

struct DevicePiece {
  std::byte* data = nullptr;  // in the device's memory
  int64_t num_bytes = 0;
};

// Copies that come after the steps that they were told to follow, and run beside later ones: no op
// of those may touch the pieces. Each call throws DeviceError.
class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;

  // Behind all ops that were asked for so far, on the thread that asks for them: the end of step
  // `step`. Numbers grow, but for a step that is asked for again after it has failed.
  virtual void mark(int64_t step) = 0;
  // Copies asked for from now on come after the ops of step `step` and of those before it. At most
  // four steps after it have been marked. Any thread.
  virtual void follow(int64_t step) = 0;

  // Both are done when they return. Any thread. `take` sees the pieces, at most max_bytes of
  // make_cuda_copies() in all, one behind another in host memory.
  virtual void read(std::span<const DevicePiece> pieces,
                    const std::function<void(const std::byte*)>& take) = 0;
  // `fill` writes them there first.
  virtual void write(std::span<const DevicePiece> pieces,
                     const std::function<void(std::byte*)>& fill) = 0;
};

}  // namespace llmserve
