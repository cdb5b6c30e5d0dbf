// Copies beside the ops by threads of the host, through pinned memory.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "core/buffer.h"
#include "kernels/cuda/cuda_event.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/pinned_memory.h"
#include "kernels/device_copies.h"

namespace llmserve::cuda {

// Each call has a stream and a buffer to itself: a few threads fill a link, and more wait for one.
class PinnedCopies final : public DeviceCopies {
 public:
  // max_bytes: of a call. `memory` outlives it. The calling thread's device stays as it is. Throws
  // DeviceError, ResourceExhausted.
  PinnedCopies(const DeviceMemory& memory, int64_t max_bytes);
  ~PinnedCopies() override;
  PinnedCopies(const PinnedCopies&) = delete;
  PinnedCopies& operator=(const PinnedCopies&) = delete;

  void mark(int64_t step) override;
  void follow(int64_t step) override;
  void read(std::span<const DevicePiece> pieces,
            const std::function<void(const std::byte*)>& take) override;
  void write(std::span<const DevicePiece> pieces,
             const std::function<void(std::byte*)>& fill) override;

 private:
  struct Slot {
    Buffer data;
    cudaStream_t stream = nullptr;
    bool is_taken = false;
  };
  // The end of a step in the stream of the ops.
  struct Mark {
    int64_t step = 0;  // 0: none yet
    std::optional<Event> event;
  };
  class Taken;  // a slot, as long as it lives

  void check_size(std::span<const DevicePiece> pieces) const;
  static void copy(const Slot& slot, std::span<const DevicePiece> pieces, bool to_host);

  const DeviceMemory& memory_;
  const int64_t max_bytes_;
  PinnedMemory pinned_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable is_free_;
  std::array<Slot, 4> slots_;
  // A ring, the next to be made first. At most four steps are in flight, and those before them are
  // followed.
  std::array<Mark, 8> marks_;
  size_t next_mark_ = 0;
};

}  // namespace llmserve::cuda
