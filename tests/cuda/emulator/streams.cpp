#include "streams.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

using Work = std::function<void()>;

struct CUgraph_st {
  std::vector<Work> work;
};
struct CUgraphExec_st {
  std::vector<Work> work;
};

namespace llmserve::cuda::emulator {
namespace {

struct Stream {
  std::deque<Work> work;
  uint64_t num_asked = 0;
  uint64_t num_done = 0;
  std::unique_ptr<CUgraph_st> capture;  // where work goes instead
};

// Work itself asks for events of other streams to come first.
std::recursive_mutex mutex;
// By handle: those of other libraries come without having been made here.
std::map<cudaStream_t, Stream> streams;
uintptr_t next_handle = 1000;
std::atomic<size_t> num_graphs = 0;

void run_until(Stream& stream, uint64_t count) {
  while (stream.num_done < count) {
    const Work next = std::move(stream.work.front());
    stream.work.pop_front();
    next();
    ++stream.num_done;
  }
}

// One piece of work, since who asks again and again expects the device to get on.
cudaError_t query(Stream& stream, uint64_t count) {
  if (stream.num_done >= count) return cudaSuccess;
  run_until(stream, stream.num_done + 1);
  return cudaErrorNotReady;
}

}  // namespace

void enqueue(cudaStream_t handle, Work work) {
  const std::lock_guard lock(mutex);
  Stream& stream = streams[handle];
  if (stream.capture) {
    stream.capture->work.push_back(std::move(work));
    return;
  }
  stream.work.push_back(std::move(work));
  ++stream.num_asked;
}

size_t graph_bytes() {
  constexpr size_t kOne = 64 << 10;
  return num_graphs * kOne;
}

bool is_any_captured() {
  const std::lock_guard lock(mutex);
  return std::ranges::any_of(streams,
                             [](const auto& entry) { return entry.second.capture != nullptr; });
}

}  // namespace llmserve::cuda::emulator

using namespace llmserve::cuda::emulator;

struct CUevent_st {
  Stream* stream = nullptr;
  uint64_t count = 0;
};

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned) {
  const std::lock_guard lock(mutex);
  *handle = reinterpret_cast<cudaStream_t>(next_handle++);
  streams[*handle];
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const std::lock_guard lock(mutex);
  Stream& stream = streams[handle];
  if (stream.capture) return cudaErrorStreamCaptureUnsupported;
  run_until(stream, stream.num_asked);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) { return cudaStreamSynchronize(handle); }
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const std::lock_guard lock(mutex);
  Stream& stream = streams[handle];
  return query(stream, stream.num_asked);
}
cudaError_t cudaDeviceSynchronize() {
  const std::lock_guard lock(mutex);
  if (is_any_captured()) return cudaErrorStreamCaptureUnsupported;
  for (auto& [handle, stream] : streams) run_until(stream, stream.num_asked);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  const std::lock_guard lock(mutex);
  Stream& stream = streams[handle];
  if (stream.capture) return cudaErrorStreamCaptureUnsupported;
  *event = {&stream, stream.num_asked};
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  const std::lock_guard lock(mutex);
  if (streams[handle].capture) return cudaErrorStreamCaptureIsolation;
  if (event->stream == nullptr || event->stream == &streams[handle]) return cudaSuccess;
  enqueue(handle, [recorded = *event] { run_until(*recorded.stream, recorded.count); });
  return cudaSuccess;
}
// Time goes by in jumps: no two intervals in a row are alike.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  static int count = 0;
  *milliseconds = static_cast<float>(1 + count++ * 7 % 5);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const std::lock_guard lock(mutex);
  if (event->stream != nullptr) run_until(*event->stream, event->count);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(mutex);
  return event->stream == nullptr ? cudaSuccess : query(*event->stream, event->count);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  const std::lock_guard lock(mutex);
  streams[handle].capture = std::make_unique<CUgraph_st>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const std::lock_guard lock(mutex);
  *graph = streams[handle].capture.release();
  return *graph != nullptr ? cudaSuccess : cudaErrorIllegalState;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const std::lock_guard lock(mutex);
  *status = streams[handle].capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
// A test asks for a device that has no memory left for it.
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  if (std::getenv("LLMSERVE_EMULATOR_NO_GRAPHS") != nullptr) return cudaErrorMemoryAllocation;
  *exec = new CUgraphExec_st{graph->work};
  ++num_graphs;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  const std::lock_guard lock(mutex);
  for (const Work& work : exec->work) enqueue(handle, work);
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  cudaDeviceSynchronize();
  --num_graphs;
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

// For a library that does its work when it is asked (fake_cublaslt.cpp).
__attribute__((visibility("default"))) void llmserve_emulator_wait(cudaStream_t stream) {
  cudaStreamSynchronize(stream);
}

}  // extern "C"
