// One rank alone, in host memory: what a model on one machine's processor is given.
#pragma once

#include <atomic>

#include "comm/communicator.h"

namespace llmserve {

class SingleCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  std::string description() const override { return "one rank, nothing to exchange"; }

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
  void barrier() override { check(); }
  void check() override;
  void abort() noexcept override { is_aborted_ = true; }

 private:
  std::atomic<bool> is_aborted_{false};
};

}  // namespace llmserve
