// What this process may use of the machine: its control group's limits count, not only the
// hardware.
#pragma once

#include <cstdint>

namespace llmserve {

// Memory that the process can still take: the smaller of the system's available memory and what
// every enclosing control group leaves (v1 and v2), in bytes. Reclaimable page cache counts as
// available.
int64_t available_memory_bytes();

// Physical cores among the CPUs that the process may run on, cut by the control group's CPU quota;
// at least 1. Two hardware threads of one core share its vector units, so more threads than this do
// not help.
int32_t default_num_threads();

}  // namespace llmserve
