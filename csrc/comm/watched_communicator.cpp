#include "comm/watched_communicator.h"

namespace llmserve {
namespace {

constexpr const char* kAllToAll = "All-to-all communication";

// Integers are rows of experts, of which one rank brings bits and the others zeros.
const char* sum_name(DType dtype) { return dtype == DType::kI32 ? kAllToAll : "Sum over ranks"; }

class Waiting {
 public:
  Waiting(ExchangeWatch& watch, const char* name) : watch_(watch) { watch_.begin_exchange(name); }
  ~Waiting() { watch_.end_exchange(); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  ExchangeWatch& watch_;
};

}  // namespace

void WatchedCommunicator::all_reduce(const Tensor& data, Reduction reduction) {
  const Waiting waiting(watch_, sum_name(data.dtype));
  inner_.all_reduce(data, reduction);
}

// Of unequal parts, which are what each rank's experts have made of their rows.
void WatchedCommunicator::all_gather(const ConstTensor& x, const Tensor& out, Counts counts) {
  const Waiting waiting(watch_, counts.empty() ? "Gather" : kAllToAll);
  inner_.all_gather(x, out, counts);
}

void WatchedCommunicator::gather_columns(const ConstTensor& x, const Tensor& out, Counts counts,
                                         int to) {
  const Waiting waiting(watch_, "Gather of columns");
  inner_.gather_columns(x, out, counts, to);
}

void WatchedCommunicator::reduce_scatter(const ConstTensor& x, const Tensor& out,
                                         Reduction reduction, Counts counts) {
  const Waiting waiting(watch_, sum_name(x.dtype));
  inner_.reduce_scatter(x, out, reduction, counts);
}

void WatchedCommunicator::all_to_all(const ConstTensor& x, const Tensor& out, Counts send_counts,
                                     Counts receive_counts) {
  const Waiting waiting(watch_, kAllToAll);
  inner_.all_to_all(x, out, send_counts, receive_counts);
}

void WatchedCommunicator::broadcast(const Tensor& data, int root) {
  const Waiting waiting(watch_, "Broadcast");
  inner_.broadcast(data, root);
}

void WatchedCommunicator::send(const ConstTensor& x, int to) {
  const Waiting waiting(watch_, "Send");
  inner_.send(x, to);
}

void WatchedCommunicator::recv(const Tensor& out, int from) {
  const Waiting waiting(watch_, "Receive");
  inner_.recv(out, from);
}

void WatchedCommunicator::barrier() {
  const Waiting waiting(watch_, "Barrier");
  inner_.barrier();
}

}  // namespace llmserve
