// Ranks with a GPU each, over NCCL.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl_library.h"
#include "core/buffer.h"
#include "core/device_queue.h"

namespace llmserve {

struct NcclOptions {
  int rank = 0;
  int world_size = 1;
  nccl::UniqueId id{};  // rank 0's make_nccl_id(), in all ranks
  DeviceQueue queue;    // of the device that is current where calls are made
  Memory* memory = nullptr;
  int64_t staging_bytes = 0;  // as RankPlace's
  // For the others to come, and for what is under way to end: minutes, since a rank may compile or
  // load first.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  std::shared_ptr<std::atomic<int64_t>> num_errors;  // as GroupOptions'
  // Of all ranks in this process: whoever waits for one that has failed waits no more.
  std::shared_ptr<std::atomic<bool>> has_failed = std::make_shared<std::atomic<bool>>(false);
  // Of ranks in other processes: whether one has gone, and how they hear that this one gives up.
  // Any thread. None: there are none.
  std::function<bool()> has_lost_rank;
  std::function<void()> leave;
};

// What the ranks find each other by. Throws DeviceError.
nccl::UniqueId make_nccl_id(const NcclLibrary& library);

// NCCL's calls never block here: each is polled, by ncclCommGetAsyncError, until it has ended, has
// failed, or the time limit is over, which aborts the communicator.
class NcclCommunicator final : public Communicator {
 public:
  // Meets the other ranks. Throws InvalidArgument, DeviceError.
  NcclCommunicator(NcclLibrary library, NcclOptions options);
  ~NcclCommunicator() override;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return options_.rank; }
  int world_size() const override { return options_.world_size; }
  std::string description() const override;

  void all_reduce(const Tensor& data, Reduction reduction) override;
  void all_gather(const ConstTensor& x, const Tensor& out, Counts counts) override;
  void gather_columns(const ConstTensor& x, const Tensor& out, Counts counts, int to) override;
  void reduce_scatter(const ConstTensor& x, const Tensor& out, Reduction reduction,
                      Counts counts) override;
  void all_to_all(const ConstTensor& x, const Tensor& out, Counts send_counts,
                  Counts receive_counts) override;
  void broadcast(const Tensor& data, int root) override;
  void send(const ConstTensor& x, int to) override;
  void recv(const Tensor& out, int from) override;
  void wait() override;
  void barrier() override;
  void check() override;
  void abort() noexcept override;

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  Deadline deadline() const { return std::chrono::steady_clock::now() + options_.timeout; }
  // One call, and until NCCL has taken it in.
  void run(const char* what, const std::function<nccl::Result()>& call);
  // Several, which begin together. `calls` hands each result to the function that it is given.
  using Note = std::function<void(nccl::Result)>;
  void run_group(const char* what, const std::function<void(const Note&)>& calls);
  // Whether the last call has been taken in; throws if it failed.
  bool has_settled(const char* what);
  void settle(const char* what, Deadline deadline);
  [[noreturn]] void fail(const std::string& problem);
  // Each rank's part of `whole`, which this rank's is in already.
  void share_parts(std::byte* whole, const std::vector<int64_t>& counts, DType dtype);
  // Each other rank's part comes to rank `to`.
  void collect_parts(const std::byte* own, std::byte* whole, const std::vector<int64_t>& counts,
                     DType dtype, int to);
  std::byte* staging(int64_t num_bytes);
  void copy_rows(const RowCopy& copy);
  void throw_if_ended() const;
  void fail_with_others();
  void forget_recorded() const;
  std::string who() const;  // "rank 0 of 1"

  const NcclLibrary library_;
  const NcclOptions options_;
  Buffer token_;  // what barrier() exchanges
  // The last is in use. Those before are kept, since to free one waits for the device, where
  // exchanges may wait for calls that this rank has still to make.
  std::vector<Buffer> staging_;
  std::mutex abort_mutex_;  // held until NCCL has ended it
  // Held around each of NCCL's calls, none of which waits: abort() may come from elsewhere.
  mutable std::mutex mutex_;
  nccl::Comm comm_ = nullptr;  // null: ended
  std::string ended_by_;
};

}  // namespace llmserve
