// Streams as profilers show them, and which of them the device serves first.
#pragma once

#include <cuda_runtime_api.h>

namespace llmserve::cuda {

// Of kernels that could run at the same time those of a stream that goes first begin first. Copies
// have engines of their own, which take no notice of it.
enum class StreamPriority { kFirst, kLast };

// A stream of the current device, which waits for no other one unless it is told to. `name` is a
// literal. Whoever made it destroys it. Throws DeviceError.
cudaStream_t make_stream(const char* name, StreamPriority priority);

}  // namespace llmserve::cuda
