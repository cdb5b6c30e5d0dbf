#include "kernels/cuda/cuda_memory.h"

#include <exception>
#include <utility>

#include "core/error.h"
#include "core/human_bytes.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/named_stream.h"

namespace llmserve::cuda {
namespace {

// From here on the driver's own staging of ordinary memory, by one thread, is the slower one.
constexpr int64_t kLargeCopyBytes = int64_t{4} << 20;

}  // namespace

void throw_device_error(const char* call, cudaError_t code) {
  throw DeviceError(concat(call, " failed with ", cudaGetErrorName(code), " (",
                           static_cast<int>(code), "): ", cudaGetErrorString(code)));
}

DeviceMemory::DeviceMemory(int device) : device_(device) {
  make_current();
  own_stream_ = make_stream("compute", StreamPriority::kFirst);
  check("cudaEventCreateWithFlags", cudaEventCreateWithFlags(&handover_, cudaEventDisableTiming));
  stream_ = own_stream_;
  int has_pools = 0;
  check("cudaDeviceGetAttribute",
        cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, device_));
  if (has_pools == 0) return;
  cudaMemPoolProps props{};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = device_;
  check("cudaMemPoolCreate", cudaMemPoolCreate(&pool_, &props));
}

DeviceMemory::~DeviceMemory() {
  cudaSetDevice(device_);
  cudaEventDestroy(handover_);
  cudaStreamDestroy(own_stream_);
  if (pool_ != nullptr) cudaMemPoolDestroy(pool_);
}

void DeviceMemory::make_current() const { check("cudaSetDevice", cudaSetDevice(device_)); }

// The other stream is known to live only as long as this call: its end is recorded before it
// returns, whatever happens, and the next stream waits for that.
void DeviceMemory::run_on(cudaStream_t stream, const std::function<void()>& work) {
  int caller_device = 0;
  check("cudaGetDevice", cudaGetDevice(&caller_device));
  make_current();
  const auto hand_over = [this](cudaStream_t from, cudaStream_t to) {
    const cudaError_t code = cudaEventRecord(handover_, from);
    return code == cudaSuccess ? cudaStreamWaitEvent(to, handover_, 0) : code;
  };
  check("cudaStreamWaitEvent", hand_over(own_stream_, stream));
  stream_ = stream;
  std::exception_ptr error;
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  stream_ = own_stream_;
  const cudaError_t code = hand_over(stream, own_stream_);
  cudaSetDevice(caller_device);
  if (error) std::rethrow_exception(error);
  check("cudaStreamWaitEvent", code);
}

int64_t DeviceMemory::available_bytes() const {
  make_current();
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  check("cudaMemGetInfo", cudaMemGetInfo(&free_bytes, &total_bytes));
  return static_cast<int64_t>(free_bytes);
}

std::byte* DeviceMemory::allocate(int64_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  make_current();
  // A capture would take an allocation of the pool for a part of the graph.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check("cudaStreamIsCapturing", cudaStreamIsCapturing(stream_, &status));
  if (status != cudaStreamCaptureStatusNone)
    throw NotSupported("memory is allocated while a step is captured");
  const auto size = static_cast<size_t>(num_bytes);
  void* data = nullptr;
  const cudaError_t code = num_bytes < 0 ? cudaErrorMemoryAllocation
                           : pool_ == nullptr
                               ? cudaMalloc(&data, size)
                               : cudaMallocFromPoolAsync(&data, size, pool_, stream_);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // it is told here; later calls need not hear of it
    throw ResourceExhausted(concat("the GPU has no ", human_bytes(num_bytes), " left (",
                                   human_bytes(available_bytes()),
                                   " are free); use a smaller model, max_model_len or KV cache"));
  }
  check("cudaMalloc", code);
  check("cudaMemsetAsync", cudaMemsetAsync(data, 0, static_cast<size_t>(num_bytes), stream_));
  return static_cast<std::byte*>(data);
}

void DeviceMemory::release(std::byte* data, int64_t) noexcept {
  cudaSetDevice(device_);
  cudaDeviceSynchronize();  // whatever stream uses it
  if (pool_ == nullptr) {
    cudaFree(data);
    return;
  }
  // A pool goes on counting as used what cudaFree() is given, and what is freed in the order of a
  // stream until the host has seen the stream get there.
  cudaFreeAsync(data, own_stream_);
  cudaStreamSynchronize(own_stream_);
  cudaMemPoolTrimTo(pool_, 0);
}

// What no pool has is opened by NCCL itself (cudaDeviceEnablePeerAccess).
void DeviceMemory::show_to_peers() {
  if (pool_ == nullptr || std::exchange(is_shown_, true)) return;
  int num_devices = 0;
  check("cudaGetDeviceCount", cudaGetDeviceCount(&num_devices));
  for (int peer = 0; peer < num_devices; ++peer) {
    int can_access = 0;
    if (peer == device_) continue;
    check("cudaDeviceCanAccessPeer", cudaDeviceCanAccessPeer(&can_access, peer, device_));
    if (can_access == 0) continue;
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = peer;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    check("cudaMemPoolSetAccess", cudaMemPoolSetAccess(pool_, &access, 1));
  }
}

PoolUse DeviceMemory::pool_use() const {
  if (pool_ == nullptr) return {};
  make_current();
  const auto value = [this](cudaMemPoolAttr attribute) {
    uint64_t bytes = 0;
    check("cudaMemPoolGetAttribute", cudaMemPoolGetAttribute(pool_, attribute, &bytes));
    return static_cast<int64_t>(bytes);
  };
  return {.used_bytes = value(cudaMemPoolAttrUsedMemCurrent),
          .used_high_bytes = value(cudaMemPoolAttrUsedMemHigh),
          .reserved_bytes = value(cudaMemPoolAttrReservedMemCurrent),
          .reserved_high_bytes = value(cudaMemPoolAttrReservedMemHigh)};
}

void DeviceMemory::copy_from_host(void* to, const void* from, int64_t num_bytes) {
  if (num_bytes == 0) return;
  make_current();
  if (num_bytes >= kLargeCopyBytes && upload_) {
    upload_(to, from, num_bytes);
    synchronize();
    return;
  }
  check("cudaMemcpyAsync to the device",
        cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyHostToDevice, stream_));
  synchronize();
}

void DeviceMemory::copy_to_host(void* to, const void* from, int64_t num_bytes) {
  if (num_bytes == 0) return;
  make_current();
  check("cudaMemcpyAsync to the host",
        cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDeviceToHost, stream_));
  synchronize();
}

void DeviceMemory::synchronize() {
  make_current();
  check("cudaStreamSynchronize", cudaStreamSynchronize(stream_));
}

}  // namespace llmserve::cuda
