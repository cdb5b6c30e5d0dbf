// Which instruction sets this build has kernels for, which of them this machine can run, and its
// caches.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/cpu/kernel_table.h"

namespace llmserve {

// One row an instruction set, best first: the only place that lists them.
struct CpuIsa {
  std::string_view name;
  bool (*can_run)();  // the machine's and the operating system's support
  cpu::KernelTable (*kernels)();
};
std::span<const CpuIsa> cpu_isa_registry();

// The best that the machine can run and that is not above `cap`; an empty cap is the environment's
// LLMSERVE_CPU_ISA, or none. Throws InvalidArgument on an unknown name.
const CpuIsa& select_cpu_isa(std::string_view cap);

// Of a core's L1 for data; 32 KiB, the least of today's servers, where the system does not say.
int64_t l1_data_bytes();

}  // namespace llmserve
