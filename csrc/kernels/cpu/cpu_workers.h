// What the parts of the cpu backend share: the kernels of one instruction set, the threads, and the
// working memory of each thread.
#pragma once

#include <algorithm>
#include <vector>

#include "core/buffer.h"
#include "core/thread_pool.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_features.h"

namespace llmserve {

class CpuWorkers {
 public:
  explicit CpuWorkers(const BackendOptions& options)
      : isa_(select_cpu_isa(options.isa)),
        kernels_(isa_.kernels()),
        pool_(options.num_threads),
        scratch_(static_cast<size_t>(options.num_threads)) {}

  const CpuIsa& isa() const { return isa_; }
  const cpu::KernelTable& kernels() const { return kernels_; }
  int num_threads() const { return pool_.num_threads(); }
  ThreadPool& pool() { return pool_; }

  // A thread's memory, of what reserve_scratch() was asked for at most. It belongs to one op, which
  // may write over all of it.
  template <class T = std::byte>
  T* scratch(int thread_idx) const {
    return reinterpret_cast<T*>(scratch_[static_cast<size_t>(thread_idx)].data());
  }
  // Grows each thread's memory to at least this many bytes; what was in it is lost then.
  void reserve_scratch(int64_t bytes) {
    for (Buffer& buffer : scratch_)
      if (buffer.num_bytes() < bytes) buffer = Buffer(bytes);
  }
  void reserve_scratch_floats(int64_t floats) {
    reserve_scratch(floats * static_cast<int64_t>(sizeof(float)));
  }

 private:
  const CpuIsa& isa_;
  const cpu::KernelTable kernels_;
  ThreadPool pool_;
  std::vector<Buffer> scratch_;  // one a thread
};

}  // namespace llmserve
