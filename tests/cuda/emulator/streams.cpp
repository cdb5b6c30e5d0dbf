#include "streams.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

// What comes in a stream's turn, and not before is_ready(), if that is given.
struct Work {
  std::function<void()> run;
  std::function<bool()> is_ready;
  std::function<void()> launch;  // of a graph: asks for what comes then, in its place
};

struct CUgraph_st {
  std::vector<Work> work;
};
struct CUgraphExec_st {
  std::vector<Work> work;
};

namespace llmserve::cuda::emulator {
namespace {

struct Stream {
  int device = current_device();
  std::deque<Work> work;
  int priority = 0;
  bool is_running = false;  // the piece before the first of `work`, by some thread
  uint64_t num_asked = 0;
  uint64_t num_done = 0;
  std::unique_ptr<CUgraph_st> capture;  // where work goes instead
  std::thread::id captured_by;
};

// Guards all streams. Work itself asks for events of other streams to come first, so that a thread
// may hold it several times over.
std::mutex mutex;
std::condition_variable changed;
thread_local int depth = 0;
class Lock {
 public:
  Lock() {
    if (depth++ == 0) mutex.lock();
  }
  ~Lock() {
    if (--depth == 0) mutex.unlock();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};
// Others get on meanwhile.
void wait_for_change() {
  const int held = std::exchange(depth, 0);
  {
    std::unique_lock lock(mutex, std::adopt_lock);
    changed.wait(lock);
    lock.release();
  }
  depth = held;
}
// By handle: those of other libraries come without having been made here.
std::map<cudaStream_t, Stream> streams;
uintptr_t next_handle = 1000;
// As NVIDIA's devices have them: the smaller number goes first.
constexpr int kLastPriority = 0;
constexpr int kFirstPriority = -5;
std::atomic<size_t> num_graphs = 0;

bool can_run(const Stream& stream) {
  return !stream.is_running && (!stream.work.front().is_ready || stream.work.front().is_ready());
}

void run_until(Stream& stream, uint64_t count) {
  while (stream.num_done < count) {
    if (!can_run(stream)) {
      wait_for_change();
      continue;
    }
    const Work next = std::move(stream.work.front());
    stream.work.pop_front();
    stream.is_running = true;
    next.run();
    stream.is_running = false;
    ++stream.num_done;
    changed.notify_all();
  }
}

// Some pieces of work, since who asks again and again expects the device to get on.
constexpr int kPiecesAQuery = 32;

cudaError_t query(Stream& stream, uint64_t count) {
  if (stream.num_done >= count) return cudaSuccess;
  for (int i = 0; i < kPiecesAQuery && stream.num_done < count && can_run(stream); ++i)
    run_until(stream, stream.num_done + 1);
  return cudaErrorNotReady;
}

void add(cudaStream_t handle, Work work) {
  const Lock lock;
  Stream& stream = streams[handle];
  if (stream.capture) {
    stream.capture->work.push_back(std::move(work));
    return;
  }
  stream.work.push_back(std::move(work));
  ++stream.num_asked;
  changed.notify_all();
}

}  // namespace

int& current_device() {
  thread_local int device = 0;
  return device;
}

void enqueue(cudaStream_t handle, std::function<void()> work) {
  add(handle, {.run = std::move(work), .is_ready = {}, .launch = {}});
}

size_t graph_bytes() {
  constexpr size_t kOne = 64 << 10;
  return num_graphs * kOne;
}

bool is_any_captured() {
  const Lock lock;
  return std::ranges::any_of(streams, [](const auto& entry) {
    return entry.second.capture != nullptr &&
           entry.second.captured_by == std::this_thread::get_id();
  });
}

}  // namespace llmserve::cuda::emulator

using namespace llmserve::cuda::emulator;

// A test's: the device whose calls fail from now on, as after a fault of a kernel; -1: none.
extern "C" {
__attribute__((visibility("default"))) std::atomic<int> llmserve_emulator_lost_device = -1;
}

namespace {

cudaError_t state_of(const Stream& stream, cudaError_t code) {
  return stream.device == llmserve_emulator_lost_device ? cudaErrorIllegalAddress : code;
}

}  // namespace

struct CUevent_st {
  Stream* stream = nullptr;
  uint64_t count = 0;
};

extern "C" {

cudaError_t cudaDeviceGetStreamPriorityRange(int* last, int* first) {
  *last = kLastPriority;
  *first = kFirstPriority;
  return cudaSuccess;
}
// What it is is kept for tests: one stream's work waits for no other's here.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  const Lock lock;
  *handle = reinterpret_cast<cudaStream_t>(next_handle++);
  streams[*handle].priority = std::clamp(priority, kFirstPriority, kLastPriority);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Lock lock;
  Stream& stream = streams[handle];
  if (stream.capture) return cudaErrorStreamCaptureUnsupported;
  run_until(stream, stream.num_asked);
  return state_of(stream, cudaSuccess);
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) { return cudaStreamSynchronize(handle); }
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Lock lock;
  Stream& stream = streams[handle];
  return state_of(stream, query(stream, stream.num_asked));
}
cudaError_t cudaDeviceSynchronize() {
  const Lock lock;
  if (is_any_captured()) return cudaErrorStreamCaptureUnsupported;
  for (auto& [handle, stream] : streams)
    if (stream.device == current_device()) run_until(stream, stream.num_asked);
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
  const Lock lock;
  Stream& stream = streams[handle];
  if (stream.capture) return cudaErrorStreamCaptureUnsupported;
  *event = {&stream, stream.num_asked};
  return state_of(stream, cudaSuccess);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  const Lock lock;
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
  const Lock lock;
  if (event->stream != nullptr) run_until(*event->stream, event->count);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock lock;
  return event->stream == nullptr ? cudaSuccess : query(*event->stream, event->count);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  const Lock lock;
  streams[handle].capture = std::make_unique<CUgraph_st>();
  streams[handle].captured_by = std::this_thread::get_id();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const Lock lock;
  *graph = streams[handle].capture.release();
  return *graph != nullptr ? cudaSuccess : cudaErrorIllegalState;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Lock lock;
  *status = streams[handle].capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
// A test asks for devices that have no memory left for it: all, or one by its number.
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  if (const char* full = std::getenv("LLMSERVE_EMULATOR_NO_GRAPHS");
      full != nullptr && (std::string_view(full) == "all" || std::atoi(full) == current_device()))
    return cudaErrorMemoryAllocation;
  *exec = new CUgraphExec_st{graph->work};
  ++num_graphs;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  const Lock lock;
  for (const Work& work : exec->work) {
    if (work.launch)
      work.launch();
    else
      add(handle, work);
  }
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
// What was launched is in the stream, and is not waited for.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  --num_graphs;
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

#define LLMSERVE_EXPORT __attribute__((visibility("default")))

// For a library that does its work when it is asked (fake_cublaslt.cpp).
LLMSERVE_EXPORT void llmserve_emulator_wait(cudaStream_t stream) { cudaStreamSynchronize(stream); }

// For one whose work in several streams comes together (fake_nccl.cpp). `is_ready` is asked, and
// `run` called once, with the streams locked, by whoever waits for the work. Returns its place.
LLMSERVE_EXPORT uint64_t llmserve_emulator_enqueue(cudaStream_t handle, bool (*is_ready)(void*),
                                                   void (*run)(void*), void* context) {
  const Lock lock;
  add(handle,
      {.run = [=] { run(context); }, .is_ready = [=] { return is_ready(context); }, .launch = {}});
  return streams[handle].num_asked;
}
// Of a stream that is captured: what each launch of the graph asks for at this place.
LLMSERVE_EXPORT void llmserve_emulator_record(cudaStream_t handle,
                                              const std::function<void()>& launch) {
  const Lock lock;
  streams[handle].capture->work.push_back({.run = {}, .is_ready = {}, .launch = launch});
}
LLMSERVE_EXPORT int llmserve_emulator_is_captured(cudaStream_t handle) {
  const Lock lock;
  return streams[handle].capture != nullptr ? 1 : 0;
}
// All of the stream that lies before a place.
LLMSERVE_EXPORT void llmserve_emulator_run_before(cudaStream_t handle, uint64_t place) {
  const Lock lock;
  run_until(streams[handle], place - 1);
}
// With the streams locked; what is ready may be so by it.
LLMSERVE_EXPORT void llmserve_emulator_change(void (*act)(void*), void* context) {
  const Lock lock;
  act(context);
  changed.notify_all();
}
LLMSERVE_EXPORT int llmserve_emulator_priority(cudaStream_t handle) {
  const Lock lock;
  return streams[handle].priority;
}
LLMSERVE_EXPORT int llmserve_emulator_device() { return current_device(); }

}  // extern "C"
