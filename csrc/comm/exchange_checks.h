// What every communicator checks of its arguments, and the parts that counts stand for.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"

namespace llmserve {

// Each throws InvalidArgument unless the tensors are as Communicator has them; `op` is its name.
void check_moved(const char* op, const ConstTensor& data);
void check_reduced(const char* op, const ConstTensor& data);
void check_root(const char* op, int root, int world_size);
// Another rank than this one.
void check_peer(const char* op, int peer, int rank, int world_size);

// Where each rank's part of a whole lies, in elements.
struct Parts {
  std::vector<int64_t> begins;  // [W + 1]
  bool is_even = false;
  int64_t begin(int rank) const { return begins[static_cast<size_t>(rank)]; }
  int64_t count(int rank) const { return begins[static_cast<size_t>(rank) + 1] - begin(rank); }
};

// The parts of `whole`, of which this rank has `part`.
Parts check_parts(const char* op, const ConstTensor& part, const ConstTensor& whole, int rank,
                  int world_size, Communicator::Counts counts);
// Throws unless x [R, counts[rank]] and, where the rank gets it, out [R, sum of counts] fit.
void check_columns(const ConstTensor& x, const Tensor& out, int rank, int world_size,
                   Communicator::Counts counts, int to);
// The parts that all_to_all sends, x's, and receives, out's.
struct ExchangedParts {
  Parts sent;
  Parts received;
};
ExchangedParts check_exchange(const ConstTensor& x, const Tensor& out, int rank, int world_size,
                              Communicator::Counts send_counts,
                              Communicator::Counts receive_counts);

}  // namespace llmserve
