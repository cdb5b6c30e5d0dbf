// Ranks as threads of one process, which read each other's memory.
#pragma once

#include <memory>

#include "comm/host_threads.h"
#include "comm/shm_group.h"

namespace llmserve {

// Makes no copy beside the results: where all have brought their tensors, each rank reads what it
// needs of the others', and an all_reduce is cut among the ranks.
class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(std::shared_ptr<ShmGroup> group, int rank, HostThreads run = {});
  ~ShmCommunicator() override;
  ShmCommunicator(const ShmCommunicator&) = delete;
  ShmCommunicator& operator=(const ShmCommunicator&) = delete;

  int rank() const override { return rank_; }
  int world_size() const override { return group_->world_size(); }
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
  void wait() override { check(); }
  void barrier() override;
  void check() override { group_->check(rank_); }
  void abort() noexcept override { group_->abort(rank_); }

 private:
  const std::shared_ptr<ShmGroup> group_;
  const int rank_;
  const HostThreads run_;
};

}  // namespace llmserve
