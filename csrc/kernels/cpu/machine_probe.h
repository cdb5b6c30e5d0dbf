// How fast this machine reads and copies memory, measured: bounds that benchmarks stand next to.
#pragma once

#include "core/buffer.h"
#include "core/thread_pool.h"
#include "kernels/cpu/cpu_features.h"

namespace llmserve {

class MachineProbe {
 public:
  // `num_bytes` are read, which should be several times the last cache. Throws ResourceExhausted if
  // the system has not got them.
  MachineProbe(const CpuIsa& isa, int num_threads, int64_t num_bytes);

  // GB/s of a streaming read of memory that no cache holds, by all threads: the faster of one that
  // prefetches into the L1 and one that does into the L2.
  double read_gb_per_s();
  // GB/s, read and written, of a plain copy of `num_bytes` by all threads into memory that the
  // system gives for it and takes back: what making something in new memory takes at least.
  double copy_gb_per_s(int64_t num_bytes);

 private:
  double read_once(bool is_to_l1);

  const cpu::KernelTable kernels_;
  ThreadPool pool_;
  Buffer memory_;
};

}  // namespace llmserve
