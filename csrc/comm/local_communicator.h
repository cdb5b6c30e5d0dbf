// One rank alone, in host memory: what a model on one machine's processor is given.
#pragma once

#include "comm/communicator.h"

namespace llmserve {

class LocalCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  std::string description() const override { return "one rank, nothing to exchange"; }

  void all_reduce(const Tensor& data, Reduction reduction) override;
  void all_gather(const ConstTensor& x, const Tensor& out) override;
  void reduce_scatter(const ConstTensor& x, const Tensor& out, Reduction reduction) override;
  void broadcast(const Tensor& data, int root) override;
  void wait() override {}
  void barrier() override {}
  void check() override {}
  void abort() noexcept override {}
};

}  // namespace llmserve
