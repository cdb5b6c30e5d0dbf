// The emulated device's streams: work is kept until somebody waits for it, as late as CUDA allows.
// What is read before it was waited for, or overwritten before it was read, is then wrong every
// time and not once in a while.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace llmserve::cuda::emulator {

// To be run in the stream's order; while the stream is captured, by each launch of the graph.
void enqueue(cudaStream_t stream, std::function<void()> work);
bool is_any_captured();
// Of the calling thread.
int& current_device();
// That the device's graphs take.
size_t graph_bytes();

}  // namespace llmserve::cuda::emulator
