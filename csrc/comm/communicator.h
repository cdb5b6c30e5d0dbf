// What the ranks that run one model exchange. Every rank makes the same calls in the same order.
#pragma once

#include <cstdint>
#include <string>

#include "core/tensor.h"

namespace llmserve {

enum class Reduction : uint8_t { kSum, kMax };

// Tensors are contiguous, float32, bfloat16 or float16, and lie where the rank computes. On a
// device a collective goes to the queue that its ops go to and returns before it is done; on a host
// it is done when it returns. Calls come from one thread, but for abort(). Each throws
// InvalidArgument on shapes, DeviceError if an exchange has failed; that ends the communicator:
// later calls throw the same error.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // For logs: "NCCL 2.27.3, rank 0 of 1".
  virtual std::string description() const = 0;

  // data = the ranks' data, reduced.
  virtual void all_reduce(const Tensor& data, Reduction reduction) = 0;
  // out [W * n] = the ranks' x [n], in their order, W being world_size().
  virtual void all_gather(const ConstTensor& x, const Tensor& out) = 0;
  // out [n] = this rank's part of the ranks' x [W * n], reduced.
  virtual void reduce_scatter(const ConstTensor& x, const Tensor& out, Reduction reduction) = 0;
  // data = that of the rank `root`.
  virtual void broadcast(const Tensor& data, int root) = 0;

  // Until all that was asked for is done, or for the time limit and no longer.
  virtual void wait() = 0;
  // Until every rank is here; wait() beside.
  virtual void barrier() = 0;
  // Whether exchanges have failed: throws if so. Never waits; for where somebody else does.
  virtual void check() = 0;
  // Ends what is under way, so that nobody waits for it any longer. Any thread may call it.
  virtual void abort() noexcept = 0;
};

// Throw InvalidArgument unless tensors are as written above.
void check_reduced(const char* op, const ConstTensor& data);
void check_parts(const char* op, const ConstTensor& part, const ConstTensor& whole, int world_size);

}  // namespace llmserve
