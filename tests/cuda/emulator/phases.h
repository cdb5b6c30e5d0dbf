// Barriers in shared memory: what copies of the tensor memory accelerator tell them.
#pragma once

#include <cstdint>

namespace llmserve::cuda::emulator {

// `num_bytes` of those that the phase waits for have been copied.
void count_bytes(uint64_t* barrier, int num_bytes);

}  // namespace llmserve::cuda::emulator
