// Shared memory of a block as its copies and its products see it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llmserve::cuda::emulator {

// At a block's beginning: nothing is on its way to the so many bytes at dynamic_shared.
void clear_copies(int num_threads, size_t shared_bytes);
void clear_products(int threads);

// Two bytes, as the async proxy reads them: ends the process where a copy put them there that was
// not shown to it.
uint16_t read_shared(uint32_t address);

}  // namespace llmserve::cuda::emulator
