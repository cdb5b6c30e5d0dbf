// Shared memory of a block as its copies and its products see it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llmserve::cuda::emulator {

// At a block's beginning: nothing is on its way to the so many bytes at dynamic_shared.
void clear_copies(int num_threads, size_t shared_bytes);
void clear_products(int threads);

// An aligned piece of 16 bytes, as the async proxy reads it: ends the process where a copy put it
// there that was not shown to it.
void read_shared(uint32_t address, uint16_t (&to)[8]);

}  // namespace llmserve::cuda::emulator
