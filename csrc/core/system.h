// What this process may use of the machine: its control group's limits count, not only the
// hardware.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace llmserve {

struct MemoryLimits {
  int64_t total_bytes = 0;      // the machine's, or the smallest limit of a control group
  int64_t available_bytes = 0;  // of it, what nobody holds; at least 0
  std::string bounded_by;  // the control group's file that leaves the least, empty: the machine
};

// Memory that the process can still take: the smaller of the system's available memory and what
// every enclosing control group leaves: v1, and v2 with memory.high, above which the kernel slows
// a process down. Page cache and other memory that the kernel gives back when asked counts as
// available, swap does not. `root` is where proc and sys are found.
MemoryLimits read_memory_limits(const std::filesystem::path& root = "/");

// The first CPU of every physical core that the process (its first thread) may run on.
std::vector<int> physical_cores();

// Physical cores among the CPUs that the process may run on, cut by the control group's CPU quota;
// at least 1. Two hardware threads of one core share its vector units, so more threads than this do
// not help.
int32_t default_num_threads();

}  // namespace llmserve
