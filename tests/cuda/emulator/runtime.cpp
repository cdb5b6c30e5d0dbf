// The part of the CUDA runtime that the backend calls, on host memory: devices, memory, copies.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "streams.h"

using llmserve::cuda::emulator::current_device;
using llmserve::cuda::emulator::enqueue;
using llmserve::cuda::emulator::graph_bytes;
using llmserve::cuda::emulator::is_any_captured;

namespace {

constexpr size_t kDeviceBytes = size_t{8} << 30;

constexpr int kMaxDevices = 8;

struct Allocation {
  size_t num_bytes = 0;
  int device = 0;
};
using Allocations = std::map<void*, Allocation>;

std::mutex mutex;
Allocations device_memory;
Allocations pinned_memory;
size_t high_bytes[kMaxDevices] = {};  // that were ever in use on each device

int num_devices() {
  const char* text = std::getenv("LLMSERVE_EMULATOR_DEVICES");
  return text == nullptr ? 1 : std::clamp(std::atoi(text), 1, kMaxDevices);
}

bool is_pinned(const void* data) {
  const std::lock_guard lock(mutex);
  const auto next = pinned_memory.upper_bound(const_cast<void*>(data));
  if (next == pinned_memory.begin()) return false;
  const auto& [begin, of] = *std::prev(next);
  return static_cast<const char*>(data) < static_cast<char*>(begin) + of.num_bytes;
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  cudaStreamIsCapturing(stream, &status);
  return status == cudaStreamCaptureStatusActive;
}

// Of the current device.
size_t used_bytes() {
  size_t used = 0;
  for (const auto& [data, of] : device_memory)
    if (of.device == current_device()) used += of.num_bytes;
  return used;
}

// Not zero: nobody promised that.
cudaError_t allocate(Allocations& kept, void** data, size_t num_bytes) {
  if (is_any_captured()) return cudaErrorStreamCaptureUnsupported;
  const std::lock_guard lock(mutex);
  if (num_bytes > kDeviceBytes - used_bytes()) return cudaErrorMemoryAllocation;
  *data = std::aligned_alloc(256, (num_bytes + 255) / 256 * 256);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  if (num_bytes < (size_t{1} << 20)) std::memset(*data, 0x7f, num_bytes);
  kept[*data] = {num_bytes, current_device()};
  size_t& high = high_bytes[current_device()];
  high = std::max(high, used_bytes());
  return cudaSuccess;
}

cudaError_t release(Allocations& kept, void* data) {
  const std::lock_guard lock(mutex);
  if (data != nullptr && kept.erase(data) == 0) return cudaErrorInvalidValue;
  std::free(data);
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= num_devices()) return cudaErrorInvalidDevice;
  *properties = cudaDeviceProp{};
  std::strcpy(properties->name, "emulated");
  properties->major = 9;
  const char* shared = std::getenv("LLMSERVE_EMULATOR_SHARED_BYTES");
  properties->sharedMemPerBlockOptin = shared != nullptr ? std::stoul(shared) : 232448;
  properties->multiProcessorCount = 2;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return cudaErrorInvalidDevice;
  current_device() = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};  // compiled for no GPU: none starts early
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "of the emulated runtime"; }

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  const std::lock_guard lock(mutex);
  *total_bytes = kDeviceBytes;
  *free_bytes = kDeviceBytes - used_bytes() - graph_bytes();
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t num_bytes) {
  return allocate(device_memory, data, num_bytes);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}
// One pool, which has taken of the device what is in use.
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = reinterpret_cast<cudaMemPool_t>(&device_memory);
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
// Every device reaches every other's memory.
cudaError_t cudaDeviceCanAccessPeer(int* can_access, int, int) {
  *can_access = 1;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc* access, size_t count) {
  return count == 1 && access->location.id < num_devices() ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
cudaError_t cudaMallocFromPoolAsync(void** data, size_t num_bytes, cudaMemPool_t, cudaStream_t) {
  return allocate(device_memory, data, num_bytes);
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr attribute, void* value) {
  const std::lock_guard lock(mutex);
  const bool is_high =
      attribute == cudaMemPoolAttrUsedMemHigh || attribute == cudaMemPoolAttrReservedMemHigh;
  *static_cast<uint64_t*>(value) = is_high ? high_bytes[current_device()] : used_bytes();
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (const cudaError_t code = cudaDeviceSynchronize(); code != cudaSuccess) return code;
  return release(device_memory, data);
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  if (is_captured(stream)) return cudaErrorInvalidValue;  // it is none of the graph's own
  enqueue(stream, [data] { release(device_memory, data); });
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, size_t num_bytes, unsigned) {
  return allocate(pinned_memory, data, num_bytes);
}
cudaError_t cudaFreeHost(void* data) {
  if (const cudaError_t code = cudaDeviceSynchronize(); code != cudaSuccess) return code;
  return release(pinned_memory, data);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return is_pinned(host) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t num_bytes, cudaStream_t stream) {
  enqueue(stream, [=] { std::memset(data, value, num_bytes); });
  return cudaSuccess;
}
// Ordinary memory is read before the call returns, and written by the time that it does; pinned
// memory when the copy's turn comes.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const auto copy = [=] { std::memmove(to, from, num_bytes); };
  const void* host = kind == cudaMemcpyHostToDevice ? from : to;
  if (kind == cudaMemcpyDeviceToDevice || is_pinned(host)) {
    enqueue(stream, copy);
    return cudaSuccess;
  }
  if (is_captured(stream)) return cudaErrorStreamCaptureUnsupported;
  if (kind == cudaMemcpyDeviceToHost) {
    enqueue(stream, copy);
    return cudaStreamSynchronize(stream);
  }
  const auto* bytes = static_cast<const char*>(from);
  enqueue(stream, [to, taken = std::vector<char>(bytes, bytes + num_bytes)] {
    std::memcpy(to, taken.data(), taken.size());
  });
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_stride, const void* from, size_t from_stride,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  cudaError_t code = cudaSuccess;
  for (size_t i = 0; i < height && code == cudaSuccess; ++i)
    code = cudaMemcpyAsync(static_cast<char*>(to) + i * to_stride,
                           static_cast<const char*>(from) + i * from_stride, width, kind, stream);
  return code;
}

}  // extern "C"
