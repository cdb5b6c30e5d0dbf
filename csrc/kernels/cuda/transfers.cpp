#include "kernels/cuda/transfers.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <utility>

#include "core/error.h"
#include "kernels/block_runs.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/launch_math.h"
#include "kernels/cuda/named_stream.h"

namespace llmserve::cuda {

Transfers::Transfers(DeviceMemory& memory, RunOnThreads run_on_threads)
    : memory_(memory), run_on_threads_(std::move(run_on_threads)), pinned_(memory.device()) {
  memory_.make_current();
  stream_ = make_stream("transfer", StreamPriority::kLast);
  slots_.resize(2 * kMaxFillers);
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

// Pieces go to whoever is free: threads that wait for the file take fewer.
void Transfers::upload(void* to, int64_t num_bytes, int64_t piece_bytes, const Fill& fill,
                       const Take& take) {
  memory_.make_current();
  follow_ops();  // the memory may have been zero-filled just now
  const int64_t num_pieces = ceil_div(num_bytes, piece_bytes);
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  const auto send = [&](Slot& slot, int64_t piece) {
    if (slot.data.num_bytes() < piece_bytes) {
      const std::lock_guard lock(mutex_);
      slot.data = Buffer();
      slot.data = Buffer(std::max(piece_bytes, kStagingBytes), pinned_);
    }
    const int64_t begin = piece * piece_bytes;
    const int64_t size = std::min(piece_bytes, num_bytes - begin);
    slot.copied.wait();
    fill(slot.data.data(), begin, size);
    const std::lock_guard lock(mutex_);
    auto* place = static_cast<std::byte*>(to) + (take ? 0 : begin);
    check("cudaMemcpyAsync of weights",
          cudaMemcpyAsync(place, slot.data.data(), static_cast<size_t>(size),
                          cudaMemcpyHostToDevice, stream_));
    slot.copied.record(stream_);
    if (take) take(place, begin, size);
  };
  run_on_threads_(std::min(kMaxFillers, num_pieces), [&](int64_t filler, int64_t) {
    try {
      memory_.make_current();
      for (int64_t round = 0, piece = 0; (piece = next++) < num_pieces; ++round)
        send(slots_[static_cast<size_t>(2 * filler + round % 2)], piece);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      error = std::current_exception();
      next = num_pieces;
    }
  });
  if (error) std::rethrow_exception(error);
}

void Transfers::upload(void* to, const void* from, int64_t num_bytes) {
  upload(to, num_bytes, kStagingBytes, [&](std::byte* piece, int64_t begin, int64_t size) {
    std::memcpy(piece, static_cast<const std::byte*>(from) + begin, static_cast<size_t>(size));
  });
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
