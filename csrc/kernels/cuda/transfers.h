// Copies between host and device beside the ops, on a stream of their own.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>

#include "core/buffer.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_event.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/pinned_memory.h"

namespace llmserve::cuda {

// Weights go through a staging buffer a piece at a time: large enough that a copy's start (some 10
// us) is nothing beside it (0.3 ms at 50 GB/s), small enough to stay in a server's last cache.
inline constexpr int64_t kStagingBytes = int64_t{16} << 20;

class Transfers {
 public:
  // memcpy, by as many threads as there are: one does not fill a PCIe 5 link.
  using HostCopy = std::function<void(void* to, const void* from, int64_t num_bytes)>;

  Transfers(DeviceMemory& memory, HostCopy copy);
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  cudaStream_t stream() const { return stream_; }
  PinnedMemory& pinned() { return pinned_; }

  // Copies to the device through two pinned buffers, one being filled while the other is on its
  // way. Begins after the ops asked for so far, and is on its way when it returns: `from` may
  // change, and ops see it after lead_ops(). `take` is called with each piece (its place on the
  // device, the bytes of `from` before it, its size) once it is in the transfer stream, to ask
  // there for what is to be done with it; without one the pieces lie one after another at `to`,
  // with one all at `to`.
  using Take = std::function<void(const std::byte* piece, int64_t begin, int64_t num_bytes)>;
  void upload(void* to, const void* from, int64_t num_bytes, const Take& take = {});
  // Ops asked for from now on come after all transfers so far.
  void lead_ops();

  // As Backend's.
  int64_t transfer_blocks(const TransferBlocksArgs& args);
  bool is_transferred(int64_t id);
  void await_transfer(int64_t id);

 private:
  struct Slot {
    Buffer data;
    Event copied;
  };
  struct Transfer {
    int64_t id = 0;
    Event done;
  };

  // Transfers asked for from now on come after all ops so far.
  void follow_ops();

  DeviceMemory& memory_;
  const HostCopy copy_;
  PinnedMemory pinned_;
  cudaStream_t stream_ = nullptr;
  Event order_;  // of one stream's end, for the other
  std::array<Slot, 2> slots_;
  size_t next_slot_ = 0;
  std::deque<Transfer> transfers_;  // not known to be done, in the stream's order
  int64_t next_transfer_ = 1;
};

}  // namespace llmserve::cuda
