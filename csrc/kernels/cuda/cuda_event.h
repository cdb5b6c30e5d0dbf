// A point in a stream's work, to wait for.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "kernels/cuda/cuda_check.h"

namespace llmserve::cuda {

// One that was never recorded has passed already.
class Event {
 public:
  Event() { check("cudaEventCreate", cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }

  // After all that was asked of the stream so far.
  void record(cudaStream_t stream) { check("cudaEventRecord", cudaEventRecord(event_, stream)); }
  // What is asked of the stream from now on waits for it.
  void hold(cudaStream_t stream) const {
    check("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, event_, 0));
  }
  // The calling thread waits for it.
  void wait() const { check("cudaEventSynchronize", cudaEventSynchronize(event_)); }
  bool is_known_to_have_passed() const { return cudaEventQuery(event_) == cudaSuccess; }
  bool has_passed() const {
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) return false;
    check("cudaEventQuery", code);
    return true;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace llmserve::cuda
