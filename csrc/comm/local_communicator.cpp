#include "comm/local_communicator.h"

#include <cstring>

#include "core/error.h"

namespace llmserve {
namespace {

void copy(const ConstTensor& from, const Tensor& to) {
  std::memmove(to.data, from.data, static_cast<size_t>(from.num_bytes()));
}

}  // namespace

void LocalCommunicator::all_reduce(const Tensor& data, Reduction) {
  check_reduced("all_reduce", data);
}

void LocalCommunicator::all_gather(const ConstTensor& x, const Tensor& out) {
  check_parts("all_gather", x, out, 1);
  copy(x, out);
}

void LocalCommunicator::reduce_scatter(const ConstTensor& x, const Tensor& out, Reduction) {
  check_parts("reduce_scatter", out, x, 1);
  copy(x, out);
}

void LocalCommunicator::broadcast(const Tensor& data, int root) {
  check_reduced("broadcast", data);
  if (root != 0) throw InvalidArgument(concat("broadcast: expected root 0 of 1 rank, got ", root));
}

}  // namespace llmserve
