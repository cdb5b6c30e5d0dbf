// Copies between host and device beside the ops, on a stream of their own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "core/buffer.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_event.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/pinned_memory.h"

namespace llmserve::cuda {

// Weights go through pinned buffers of this size: a copy of one takes 40 us at 50 GB/s, some ten
// times what asking for it does, and a thread's two stay in its own cache.
inline constexpr int64_t kStagingBytes = int64_t{2} << 20;

class Transfers {
 public:
  // Runs work(begin, end) on the host's threads, over parts of [0, count): Backend's
  // run_on_host_threads with a grain of 1. A thread copies some 8 GB/s, a PCIe 5 link 55.
  using RunOnThreads =
      std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& work)>;

  Transfers(DeviceMemory& memory, RunOnThreads run_on_threads);
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  cudaStream_t stream() const { return stream_; }
  PinnedMemory& pinned() { return pinned_; }

  // Copies num_bytes to the device in pieces of at most `piece_bytes`, which begin at multiples of
  // it. As many threads as there are, up to kMaxFillers, fill pinned buffers, two each, so that one
  // is filled while the other is on its way. Begins after the ops asked for so far, and all is on
  // its way when it returns; ops see it after lead_ops().
  //
  // fill(to, begin, size) writes bytes [begin, begin + size) to a pinned buffer, by several threads
  // at once. `take` is called with each piece (its place on the device, the bytes before it, its
  // size) once it is in the transfer stream, one after another, to ask there for what is to be done
  // with it; without one the pieces lie one after another at `to`, with one all at `to`.
  using Fill = std::function<void(std::byte* to, int64_t begin, int64_t num_bytes)>;
  using Take = std::function<void(const std::byte* piece, int64_t begin, int64_t num_bytes)>;
  void upload(void* to, int64_t num_bytes, int64_t piece_bytes, const Fill& fill,
              const Take& take = {});
  // Bytes as they are: `from` may change when it returns.
  void upload(void* to, const void* from, int64_t num_bytes);
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

  static constexpr int64_t kMaxFillers = 16;

  DeviceMemory& memory_;
  const RunOnThreads run_on_threads_;
  PinnedMemory pinned_;
  cudaStream_t stream_ = nullptr;
  Event order_;                     // of one stream's end, for the other
  std::mutex mutex_;                // while a piece is asked for, or memory for one
  std::vector<Slot> slots_;         // [2 kMaxFillers], of which those that had work have memory
  std::deque<Transfer> transfers_;  // not known to be done, in the stream's order
  int64_t next_transfer_ = 1;
};

}  // namespace llmserve::cuda
