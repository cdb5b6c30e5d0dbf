// Ranks that exchange through sockets: each pair has a connection of its own.
//
// A rank sends its part to all that want it, and each reduces by itself in the order of the ranks,
// so that all have the same bits. Of much data each reduces a part, which then goes to all.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/rank_link.h"

namespace llmserve {

// The ends of ranks that are all of this process: [world size].
std::vector<std::unique_ptr<Communicator>> make_socket_pairs(int world_size,
                                                             std::chrono::milliseconds timeout);

class TcpCommunicator final : public Communicator {
 public:
  // links: [world size], to each other rank; null for its own place.
  TcpCommunicator(int rank, std::vector<std::unique_ptr<RankLink>> links,
                  std::chrono::milliseconds timeout);

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(links_.size()); }
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
  void check() override;
  void abort() noexcept override;
  // Whether another rank has closed its end, where nobody exchanges any more. Never waits.
  bool has_lost_peer() const;

 private:
  // What goes to a rank and what comes from it.
  struct Part {
    bool sends = false, receives = false;
    Bytes out;
    std::span<std::byte> in;
  };
  // Parts [world size], of which one's own is left alone. The first that fails ends them all.
  void exchange(RankOp op, DType dtype, std::span<const Part> parts);
  void advance_all(RankOp op, DType dtype, std::span<const Part> parts);
  short advance(size_t rank);
  std::vector<Part>& fresh_parts();
  // Each rank reduces a part of the data and sends it to all: two rounds in the place of one, and
  // 2 (W - 1) / W times the data in the place of W - 1 times.
  void reduce_in_parts(const Tensor& data, Reduction reduction);
  void reduce(const std::byte* mine, DType dtype, int64_t count, Reduction reduction,
              std::byte* out);
  std::byte* staging(size_t num_bytes);

  const int rank_;
  const std::vector<std::unique_ptr<RankLink>> links_;
  const std::chrono::milliseconds timeout_;
  std::string failure_;  // of an earlier call
  std::vector<Part> parts_;
  std::vector<std::byte> staging_, packed_;
};

}  // namespace llmserve
