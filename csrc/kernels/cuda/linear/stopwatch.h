// Time on the device, for whatever is chosen by measurement.
#pragma once

#include "kernels/cuda/cuda_check.h"

namespace llmserve::cuda {

// Between two points of a stream.
class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    check("cudaEventCreate", cudaEventCreateWithFlags(&begin_, cudaEventDefault));
    check("cudaEventCreate", cudaEventCreateWithFlags(&end_, cudaEventDefault));
  }
  ~Stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  void start() { check("cudaEventRecord", cudaEventRecord(begin_, stream_)); }
  // Milliseconds since start(); waits for them.
  float stop() {
    float milliseconds = 0;
    check("cudaEventRecord", cudaEventRecord(end_, stream_));
    check("cudaEventSynchronize", cudaEventSynchronize(end_));
    check("cudaEventElapsedTime", cudaEventElapsedTime(&milliseconds, begin_, end_));
    return milliseconds;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

// Runs that are timed together, after one that is not.
inline constexpr int kTimedRuns = 4;
// A later candidate must be this much faster than the best before it: noise should not choose.
inline constexpr float kWorthwhile = 0.97f;

// While work is captured nothing can be measured.
inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check("cudaStreamIsCapturing", cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace llmserve::cuda
