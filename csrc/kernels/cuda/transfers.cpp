#include "kernels/cuda/transfers.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/block_runs.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/named_stream.h"

namespace llmserve::cuda {

Transfers::Transfers(DeviceMemory& memory, HostCopy copy)
    : memory_(memory), copy_(std::move(copy)), pinned_(memory.device()) {
  memory_.make_current();
  stream_ = make_stream("transfer", StreamPriority::kLast);
}

Transfers::~Transfers() {
  cudaSetDevice(memory_.device());
  cudaStreamDestroy(stream_);
}

void Transfers::follow_ops() {
  order_.record(memory_.stream());
  order_.hold(stream_);
}

void Transfers::lead_ops() {
  order_.record(stream_);
  order_.hold(memory_.stream());
}

void Transfers::upload(void* to, const void* from, int64_t num_bytes, const Take& take) {
  memory_.make_current();
  follow_ops();  // the memory may have been zero-filled just now
  for (int64_t begin = 0; begin < num_bytes; begin += kStagingBytes) {
    const int64_t size = std::min(kStagingBytes, num_bytes - begin);
    Slot& slot = slots_[next_slot_];
    next_slot_ = 1 - next_slot_;
    if (slot.data.num_bytes() == 0) slot.data = Buffer(kStagingBytes, pinned_);
    slot.copied.wait();
    copy_(slot.data.data(), static_cast<const std::byte*>(from) + begin, size);
    auto* piece = static_cast<std::byte*>(to) + (take ? 0 : begin);
    check("cudaMemcpyAsync of weights",
          cudaMemcpyAsync(piece, slot.data.data(), static_cast<size_t>(size),
                          cudaMemcpyHostToDevice, stream_));
    slot.copied.record(stream_);
    if (take) take(piece, begin, size);
  }
}

int64_t Transfers::transfer_blocks(const TransferBlocksArgs& args) {
  validate(args);
  memory_.make_current();
  follow_ops();
  const PagedKvCache& from = args.to_host ? args.device : args.host;
  const PagedKvCache& to = args.to_host ? args.host : args.device;
  const auto kind = args.to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  const auto copy = [&](const Tensor& source, const Tensor& destination, const BlockRun& run) {
    const int64_t bytes = cache_block_bytes(source);
    check("cudaMemcpyAsync of blocks",
          cudaMemcpyAsync(destination.as<std::byte>() + run.destination * bytes,
                          source.as<std::byte>() + run.source * bytes,
                          static_cast<size_t>(run.count * bytes), kind, stream_));
  };
  for (const BlockRun& run : block_runs(args.pairs)) {
    copy(from.keys, to.keys, run);
    if (!from.has_values_in_keys()) copy(from.values, to.values, run);
  }
  transfers_.push_back({.id = next_transfer_, .done = {}});
  transfers_.back().done.record(stream_);
  return next_transfer_++;
}

bool Transfers::is_transferred(int64_t id) {
  memory_.make_current();
  while (!transfers_.empty() && transfers_.front().done.has_passed()) transfers_.pop_front();
  return transfers_.empty() || id < transfers_.front().id;
}

void Transfers::await_transfer(int64_t id) {
  memory_.make_current();
  for (const Transfer& transfer : transfers_)
    if (transfer.id == id) transfer.done.hold(memory_.stream());
}

}  // namespace llmserve::cuda
