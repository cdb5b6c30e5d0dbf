// Copies of the tensor memory accelerator that are on their way.
#pragma once

#include <cstdint>

namespace llmserve::cuda::emulator {

// At the beginning of a block. Every second one's copies land at once, the others' when a barrier
// is waited for: nobody promised either. Ends the process where a copy was never waited for.
void clear_tensor_copies(bool land_at_once);
// Those that tell this barrier.
void land_copies(uint64_t* barrier);

}  // namespace llmserve::cuda::emulator
