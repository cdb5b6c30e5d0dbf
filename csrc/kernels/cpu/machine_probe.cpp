#include "kernels/cpu/machine_probe.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/clock.h"

namespace llmserve {
namespace {

// Long enough for the clock and for a thread's start, short enough to be repeated between ops.
constexpr int64_t kFmaCount = 5'000'000;

template <class Fn>
double seconds_of(Fn&& fn) {
  const SteadyClock clock;
  const int64_t start = clock.now_us();
  fn();
  return static_cast<double>(clock.now_us() - start) * 1e-6;
}

}  // namespace

MachineProbe::MachineProbe(const CpuIsa& isa, int num_threads, int64_t num_bytes)
    : kernels_(isa.kernels()), pool_(num_threads), memory_(num_bytes) {
  std::memset(memory_.data(), 1, static_cast<size_t>(num_bytes));
}

MachineRates MachineProbe::measure() {
  const int threads = pool_.num_threads();
  std::vector<uint32_t> sinks(static_cast<size_t>(threads) * 16);  // a cache line a thread
  const double read_s = seconds_of([&] {
    pool_.parallel_for(memory_.num_bytes(), 1 << 20, [&](int64_t begin, int64_t end, int thread) {
      sinks[static_cast<size_t>(thread) * 16] =
          kernels_.read_loop(memory_.data() + begin, end - begin);
    });
  });
  const double fma_s = seconds_of([&] {
    pool_.parallel_for(threads, 1, [&](int64_t, int64_t, int thread) {
      sinks[static_cast<size_t>(thread) * 16] = static_cast<uint32_t>(kernels_.fma_loop(kFmaCount));
    });
  });
  const double flops = static_cast<double>(kernels_.fma_loop_flops(kFmaCount)) * threads;
  return {static_cast<double>(memory_.num_bytes()) / read_s * 1e-9, flops / fma_s * 1e-9};
}

double MachineProbe::copy_gb_per_s(int64_t num_bytes) {
  num_bytes = std::min(num_bytes, memory_.num_bytes());
  const double copy_s = seconds_of([&] {
    const Buffer fresh(num_bytes);
    pool_.parallel_for(num_bytes, 1 << 20, [&](int64_t begin, int64_t end, int) {
      std::memcpy(fresh.data() + begin, memory_.data() + begin, static_cast<size_t>(end - begin));
    });
  });
  return 2 * static_cast<double>(num_bytes) / copy_s * 1e-9;
}

}  // namespace llmserve
