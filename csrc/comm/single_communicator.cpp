#include "comm/single_communicator.h"

#include <cstring>

#include "comm/exchange_checks.h"
#include "core/error.h"

namespace llmserve {
namespace {

void copy(const ConstTensor& from, const Tensor& to) {
  if (from.num_elements() > 0 && from.data != to.data)
    std::memcpy(to.data, from.data, static_cast<size_t>(from.num_bytes()));
}

}  // namespace

void SingleCommunicator::check() {
  if (is_aborted_) throw DeviceError("the communicator of rank 0 of 1 has ended: it was aborted");
}

void SingleCommunicator::all_reduce(const Tensor& data, Reduction) {
  check_reduced("all_reduce", data);
  check();
}

void SingleCommunicator::all_gather(const ConstTensor& x, const Tensor& out, Counts counts) {
  check_parts("all_gather", x, out, 0, 1, counts);
  check();
  copy(x, out);
}

void SingleCommunicator::gather_columns(const ConstTensor& x, const Tensor& out, Counts counts,
                                        int to) {
  check_columns(x, out, 0, 1, counts, to);
  check();
  for (int64_t row = 0; row < x.shape[0]; ++row) copy(x.slice(0, row, 1), out.slice(0, row, 1));
}

void SingleCommunicator::reduce_scatter(const ConstTensor& x, const Tensor& out, Reduction,
                                        Counts counts) {
  check_reduced("reduce_scatter", x);
  check_parts("reduce_scatter", out, x, 0, 1, counts);
  check();
  copy(x, out);
}

void SingleCommunicator::all_to_all(const ConstTensor& x, const Tensor& out, Counts send_counts,
                                    Counts receive_counts) {
  check_exchange(x, out, 0, 1, send_counts, receive_counts);
  check();
  copy(x, out);
}

void SingleCommunicator::broadcast(const Tensor& data, int root) {
  check_moved("broadcast", data);
  check_root("broadcast", root, 1);
  check();
}

// There is no other rank.
void SingleCommunicator::send(const ConstTensor&, int to) { check_peer("send", to, 0, 1); }
void SingleCommunicator::recv(const Tensor&, int from) { check_peer("recv", from, 0, 1); }

}  // namespace llmserve
