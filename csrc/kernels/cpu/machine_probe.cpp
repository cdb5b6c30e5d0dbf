#include "kernels/cpu/machine_probe.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/clock.h"

namespace llmserve {
namespace {

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
  // Pages that differ: a system may keep equal ones once, and then a cache holds them all.
  pool_.parallel_for(num_bytes / 8, 1 << 17, [&](int64_t begin, int64_t end, int) {
    auto* words = reinterpret_cast<uint64_t*>(memory_.data());
    for (int64_t i = begin; i < end; ++i) words[i] = static_cast<uint64_t>(i);
  });
}

double MachineProbe::read_gb_per_s() { return std::max(read_once(true), read_once(false)); }

double MachineProbe::read_once(bool is_to_l1) {
  std::vector<uint32_t> sinks(static_cast<size_t>(pool_.num_threads()) * 16);  // a line a thread
  const double read_s = seconds_of([&] {
    pool_.parallel_for(memory_.num_bytes(), 1 << 20, [&](int64_t begin, int64_t end, int thread) {
      sinks[static_cast<size_t>(thread) * 16] =
          kernels_.read_loop(memory_.data() + begin, end - begin, is_to_l1);
    });
  });
  return static_cast<double>(memory_.num_bytes()) / read_s * 1e-9;
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
