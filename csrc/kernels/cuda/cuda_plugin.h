// The interface between the extension module and the CUDA backend, which is a shared library of its
// own (lib/libllmserve_cuda.so), so that the module loads where there is no GPU and no driver.
//
// The library exports one C function. Behind it is C++: a Backend, and the exceptions that it
// throws. Both sides are therefore one build: CMake makes them together and gives both the same
// build id, which the loader compares before it touches anything else. What of core/ and kernels/
// both need (Tensor, Buffer, errors, validate) each has a hidden copy of: the copies hold no state
// but const tables, memory goes back to the Memory that it came from, by a virtual call, and
// libstdc++, which both link dynamically, matches exceptions by their types' names.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/device_queue.h"
#include "core/trace_range.h"
#include "kernels/backend.h"
#include "kernels/device_copies.h"

namespace llmserve {

// The version of this struct, and only of it.
inline constexpr uint32_t kCudaPluginAbi = 5;

struct CudaPlugin {
  // Plain C, first, at fixed places: read before all else is believed.
  uint32_t abi = 0;
  const char* build_id = nullptr;

  // Empty where a CUDA device can be used; otherwise why not, and what to do.
  std::string (*unavailable_reason)() = nullptr;
  // Of the visible devices, from 0 on.
  int (*num_devices)() = nullptr;
  int64_t (*free_bytes)(int device) = nullptr;
  std::unique_ptr<Backend> (*make)(const BackendOptions& options, int device) = nullptr;
  // Where the ops of a backend that make() made go.
  DeviceQueue (*queue)(Backend& backend) = nullptr;
  // Of memory of such a backend, which outlives them.
  std::unique_ptr<DeviceCopies> (*make_copies)(Backend& backend, int64_t max_bytes) = nullptr;
  // Takes ranges to NVIDIA's profilers; lives as long as the process.
  const RangeSink& (*range_sink)() = nullptr;
};

inline constexpr const char* kCudaPluginSymbol = "llmserve_cuda_plugin";
using CudaPluginFunction = const CudaPlugin* (*)();

}  // namespace llmserve
