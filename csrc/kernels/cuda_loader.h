// Finds and loads the CUDA backend, lib/libllmserve_cuda.so beside the extension module.
#pragma once

#include <memory>
#include <string>

#include "core/device_queue.h"
#include "kernels/backend.h"
#include "kernels/device_copies.h"

namespace llmserve {

// Empty where a CUDA device can be used; otherwise why not, and what to do. Loads the library on
// the first call, for the life of the process.
std::string cuda_unavailable_reason();

// Throws NotSupported with that reason, or DeviceError.
std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options);
// On another device than the first. Likewise.
std::unique_ptr<Backend> make_cuda_backend_on(int device, const BackendOptions& options);
// Visible devices, and what one has free. Likewise.
int num_cuda_devices();
int64_t free_cuda_bytes(int device);

// Where the ops of a backend that make_cuda_backend() made go.
DeviceQueue cuda_queue(Backend& backend);

// Copies of its memory, which it outlives, of up to max_bytes a call. The calling thread's device
// stays as it is. Throws DeviceError, ResourceExhausted.
std::unique_ptr<DeviceCopies> make_cuda_copies(Backend& backend, int64_t max_bytes);

}  // namespace llmserve
