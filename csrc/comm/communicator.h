// What the ranks that run one model exchange.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/tensor.h"

namespace llmserve {

enum class Reduction : uint8_t { kSum, kMax };

// One rank's end. W is world_size(), n counts elements; a tensor's shape beyond that is its
// caller's.
//
// Calls. Every rank makes the same calls in the same order, send() and recv() apart, with tensors
// of one dtype and counts that agree. All calls of a rank come from one thread, but for abort().
// Tensors are contiguous and lie where the rank computes. all_reduce and reduce_scatter take
// float32, bfloat16, float16 and int32, which wraps around; the others move elements of any dtype.
//
// Results. A reduction has the same bits on all ranks. In host memory it adds in float32, in the
// order of the ranks, and rounds once; NCCL has an order of its own. A maximum with a NaN is NaN in
// host memory, and unspecified with NCCL.
//
// Uneven parts. `counts` [W] says how many elements of the whole each rank has, in their order, and
// 0 is a count. Without counts all ranks have as many. It is the same on all ranks.
//
// Aliasing. Two tensors of a call do not overlap, with one exception: a part may be the rank's own
// part of the whole, in its place.
//
// Time. On a host a call is done when it returns. On a device it goes to the queue that the ops go
// to and returns before it is done: wait() waits.
//
// Errors. InvalidArgument: tensors, counts or ranks that cannot be; nothing has happened, and the
// other ranks wait for this one. DeviceError: an exchange has failed, a rank has gone, has made
// another call, or has not come within the time limit. That ends the communicator: later calls
// throw the same error, and so do calls of the other ranks, under way or not.
class Communicator {
 public:
  using Counts = std::span<const int64_t>;

  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // For logs: "NCCL 2.27.3, rank 0 of 1".
  virtual std::string description() const = 0;

  // data [n] = the ranks' data [n], reduced.
  virtual void all_reduce(const Tensor& data, Reduction reduction) = 0;
  // out [sum of counts] = the ranks' x [counts[rank]], in their order.
  virtual void all_gather(const ConstTensor& x, const Tensor& out, Counts counts = {}) = 0;
  // out [R, sum of counts] = the ranks' x [R, counts[rank]] side by side, in their order; rows may
  // be strided. `to`: the one rank that gets out, which the others leave empty; kAll: each does.
  static constexpr int kAll = -1;
  virtual void gather_columns(const ConstTensor& x, const Tensor& out, Counts counts, int to) = 0;
  // out [counts[rank]] = this rank's part of the ranks' x [sum of counts], reduced.
  virtual void reduce_scatter(const ConstTensor& x, const Tensor& out, Reduction reduction,
                              Counts counts = {}) = 0;
  // x [sum of send_counts] has a part for each rank, in their order; out [sum of receive_counts]
  // gets the part for this rank of each. receive_counts[r] is what rank r has as send_counts[rank].
  // Both empty: all parts are alike.
  virtual void all_to_all(const ConstTensor& x, const Tensor& out, Counts send_counts = {},
                          Counts receive_counts = {}) = 0;
  // data [n] = that of the rank `root`.
  virtual void broadcast(const Tensor& data, int root) = 0;
  // x [n] goes to another rank, which asks for it with recv(). Between two ranks, messages arrive
  // in the order in which they are sent. send() may wait for the recv(): ranks that send in a
  // circle wait for each other, and use all_to_all instead.
  virtual void send(const ConstTensor& x, int to) = 0;
  virtual void recv(const Tensor& out, int from) = 0;

  // Until all that was asked for is done, or for the time limit and no longer.
  virtual void wait() = 0;
  // Until every rank is here; wait() beside.
  virtual void barrier() = 0;
  // Whether exchanges have failed: throws if so. Never waits; for where somebody else does.
  virtual void check() = 0;
  // Ends what is under way, so that nobody waits for it any longer. Any thread may call it.
  virtual void abort() noexcept = 0;
};

}  // namespace llmserve
