// A communicator whose caller is told when it begins to wait for others, and when it goes on.
#pragma once

#include <string>

#include "comm/communicator.h"

namespace llmserve {

class ExchangeWatch {
 public:
  virtual ~ExchangeWatch() = default;
  // On the thread that exchanges. `name` is a literal, for people who read traces.
  virtual void begin_exchange(const char* name) = 0;
  virtual void end_exchange() noexcept = 0;
};

// Both outlive it.
class WatchedCommunicator : public Communicator {
 public:
  WatchedCommunicator(Communicator& inner, ExchangeWatch& watch) : inner_(inner), watch_(watch) {}

  int rank() const override { return inner_.rank(); }
  int world_size() const override { return inner_.world_size(); }
  std::string description() const override { return inner_.description(); }
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
  void wait() override { inner_.wait(); }
  void barrier() override;
  void check() override { inner_.check(); }
  void abort() noexcept override { inner_.abort(); }

 private:
  Communicator& inner_;
  ExchangeWatch& watch_;
};

}  // namespace llmserve
