#include "comm/nccl_communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/exchange_checks.h"
#include "core/error.h"

namespace llmserve {
namespace {

using std::chrono::steady_clock;

// For the others to hear that this rank leaves.
constexpr std::chrono::seconds kFarewell(10);

// Between two looks: short at first, since most exchanges end within a step.
class Pause {
 public:
  void take() {
    std::this_thread::sleep_for(length_);
    length_ = std::min(2 * length_, std::chrono::microseconds(1000));
  }

 private:
  std::chrono::microseconds length_{20};
};

int float_type(DType dtype) {
  if (dtype == DType::kF32) return nccl::kFloat32;
  return dtype == DType::kBF16 ? nccl::kBfloat16 : nccl::kFloat16;
}

// How NCCL is told of elements that are only moved: other types than floats go as their bytes.
struct Moved {
  explicit Moved(DType dtype)
      : is_float(dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16),
        element_bytes(size_bytes(dtype)),
        type(is_float ? float_type(dtype) : nccl::kInt8) {}
  size_t count(int64_t num_elements) const {
    return static_cast<size_t>(is_float ? num_elements : num_elements * element_bytes);
  }

  bool is_float;
  int64_t element_bytes;
  int type;
};

int op_of(Reduction reduction) { return reduction == Reduction::kSum ? nccl::kSum : nccl::kMax; }

bool has_failed(nccl::Result result) {
  return result != nccl::kSuccess && result != nccl::kInProgress;
}

void* at(void* data, int64_t element, DType dtype) {
  return static_cast<std::byte*>(data) + element * size_bytes(dtype);
}
const void* at(const void* data, int64_t element, DType dtype) {
  return static_cast<const std::byte*>(data) + element * size_bytes(dtype);
}

}  // namespace

nccl::UniqueId make_nccl_id(const NcclLibrary& library) {
  nccl::UniqueId id{};
  const nccl::Result result = library.call.GetUniqueId(&id);
  if (result != nccl::kSuccess)
    throw DeviceError(concat("ncclGetUniqueId failed: ", library.call.GetErrorString(result)));
  return id;
}

NcclCommunicator::NcclCommunicator(NcclLibrary library, NcclOptions options)
    : library_(std::move(library)), options_(std::move(options)) {
  if (options_.world_size < 1 || options_.rank < 0 || options_.rank >= options_.world_size)
    throw InvalidArgument(concat("communicator: expected a rank in [0, world size), got ", who()));
  token_ = Buffer(static_cast<int64_t>(sizeof(float)), *options_.memory);
  nccl::Config config;
  config.blocking = 0;
  const nccl::Result result = library_.call.CommInitRankConfig(&comm_, options_.world_size,
                                                               options_.id, options_.rank, &config);
  if (has_failed(result))
    fail(concat("ncclCommInitRankConfig: ", library_.call.GetErrorString(result)));
  settle("ncclCommInitRankConfig", deadline());
}

NcclCommunicator::~NcclCommunicator() {
  if (comm_ == nullptr) return;
  try {
    library_.call.CommFinalize(comm_);
    settle("ncclCommFinalize", std::min(deadline(), steady_clock::now() + kFarewell));
    library_.call.CommDestroy(comm_);
  } catch (const Error&) {  // it has been aborted, and what goes wrong at the end concerns nobody
  }
}

std::string NcclCommunicator::who() const {
  return concat("rank ", options_.rank, " of ", options_.world_size);
}

std::string NcclCommunicator::description() const {
  return concat(library_.description(), ", ", who());
}

void NcclCommunicator::throw_if_ended() const {
  if (comm_ == nullptr)
    throw DeviceError(concat("the communicator of ", who(), " has ended: ", ended_by_));
}

void NcclCommunicator::fail(const std::string& problem) {
  {
    const std::scoped_lock lock(mutex_);
    if (ended_by_.empty()) ended_by_ = problem;
  }
  abort();
  throw DeviceError(concat("exchange among GPUs failed on ", who(), ": ", problem));
}

bool NcclCommunicator::has_settled(const char* what) {
  nccl::Result state = nccl::kSuccess;
  nccl::Result result;
  std::string detail;
  {
    const std::scoped_lock lock(mutex_);
    throw_if_ended();
    result = library_.call.CommGetAsyncError(comm_, &state);
    if (result == nccl::kSuccess && state == nccl::kInProgress) return false;
    if (result == nccl::kSuccess && state == nccl::kSuccess) return true;
    if (const char* text = library_.call.GetLastError(comm_)) detail = text;
  }
  if (result == nccl::kSuccess) result = state;
  fail(
      concat(what, ": ", library_.call.GetErrorString(result), detail.empty() ? "" : "; ", detail));
}

void NcclCommunicator::settle(const char* what, Deadline deadline) {
  for (Pause pause; !has_settled(what); pause.take()) {
    if (steady_clock::now() >= deadline)
      fail(concat(what, " has not ended within ", options_.timeout.count(),
                  " ms; a rank may be gone, or may not have made the call"));
  }
}

void NcclCommunicator::run(const char* what, const std::function<nccl::Result()>& call) {
  nccl::Result result;
  {
    const std::scoped_lock lock(mutex_);
    throw_if_ended();
    result = call();
  }
  if (has_failed(result)) fail(concat(what, ": ", library_.call.GetErrorString(result)));
  settle(what, deadline());
}

void NcclCommunicator::run_group(const char* what, const std::function<void(const Note&)>& calls) {
  run(what, [&] {
    nccl::Result first = library_.call.GroupStart();
    if (has_failed(first)) return first;
    calls([&](nccl::Result result) {
      if (!has_failed(first)) first = result;
    });
    const nccl::Result end = library_.call.GroupEnd();
    return has_failed(first) ? first : end;
  });
}

void NcclCommunicator::all_reduce(const Tensor& data, Reduction reduction) {
  check_reduced("all_reduce", data);
  run("ncclAllReduce", [&] {
    return library_.call.AllReduce(data.data, data.data, static_cast<size_t>(data.num_elements()),
                                   float_type(data.dtype), op_of(reduction), comm_,
                                   options_.queue.stream);
  });
}

void NcclCommunicator::gather_columns(const ConstTensor&, const Tensor&, Counts, int) {
  throw NotSupported("communicator 'nccl' does not gather columns: no model is cut among GPUs yet");
}

// NCCL has no all_gather of uneven parts: each rank broadcasts its own.
void NcclCommunicator::all_gather(const ConstTensor& x, const Tensor& out, Counts counts) {
  const Parts parts = check_parts("all_gather", x, out, options_.rank, options_.world_size, counts);
  const Moved moved(x.dtype);
  if (parts.is_even) {
    run("ncclAllGather", [&] {
      return library_.call.AllGather(x.data, out.data, moved.count(x.num_elements()), moved.type,
                                     comm_, options_.queue.stream);
    });
    return;
  }
  run_group("ncclBroadcast", [&](const Note& note) {
    for (int root = 0; root < options_.world_size; ++root) {
      if (parts.count(root) == 0) continue;
      void* const to = at(out.data, parts.begin(root), x.dtype);
      note(library_.call.Broadcast(root == options_.rank ? x.data : to, to,
                                   moved.count(parts.count(root)), moved.type, root, comm_,
                                   options_.queue.stream));
    }
  });
}

// Nor a reduce_scatter: each part is reduced to its rank.
void NcclCommunicator::reduce_scatter(const ConstTensor& x, const Tensor& out, Reduction reduction,
                                      Counts counts) {
  check_reduced("reduce_scatter", x);
  const Parts parts =
      check_parts("reduce_scatter", out, x, options_.rank, options_.world_size, counts);
  const int type = float_type(x.dtype);
  if (parts.is_even) {
    run("ncclReduceScatter", [&] {
      return library_.call.ReduceScatter(x.data, out.data, static_cast<size_t>(out.num_elements()),
                                         type, op_of(reduction), comm_, options_.queue.stream);
    });
    return;
  }
  run_group("ncclReduce", [&](const Note& note) {
    for (int root = 0; root < options_.world_size; ++root) {
      if (parts.count(root) == 0) continue;
      note(library_.call.Reduce(at(x.data, parts.begin(root), x.dtype), out.data,
                                static_cast<size_t>(parts.count(root)), type, op_of(reduction),
                                root, comm_, options_.queue.stream));
    }
  });
}

void NcclCommunicator::all_to_all(const ConstTensor& x, const Tensor& out, Counts send_counts,
                                  Counts receive_counts) {
  const auto [sent, received] =
      check_exchange(x, out, options_.rank, options_.world_size, send_counts, receive_counts);
  const Moved moved(x.dtype);
  run_group("ncclSend and ncclRecv", [&](const Note& note) {
    for (int peer = 0; peer < options_.world_size; ++peer) {
      if (sent.count(peer) > 0)
        note(library_.call.Send(at(x.data, sent.begin(peer), x.dtype),
                                moved.count(sent.count(peer)), moved.type, peer, comm_,
                                options_.queue.stream));
      if (received.count(peer) > 0)
        note(library_.call.Recv(at(out.data, received.begin(peer), x.dtype),
                                moved.count(received.count(peer)), moved.type, peer, comm_,
                                options_.queue.stream));
    }
  });
}

void NcclCommunicator::broadcast(const Tensor& data, int root) {
  check_moved("broadcast", data);
  check_root("broadcast", root, options_.world_size);
  const Moved moved(data.dtype);
  run("ncclBroadcast", [&] {
    return library_.call.Broadcast(data.data, data.data, moved.count(data.num_elements()),
                                   moved.type, root, comm_, options_.queue.stream);
  });
}

void NcclCommunicator::send(const ConstTensor& x, int to) {
  check_moved("send", x);
  check_peer("send", to, options_.rank, options_.world_size);
  const Moved moved(x.dtype);
  run("ncclSend", [&] {
    return library_.call.Send(x.data, moved.count(x.num_elements()), moved.type, to, comm_,
                              options_.queue.stream);
  });
}

void NcclCommunicator::recv(const Tensor& out, int from) {
  check_moved("recv", out);
  check_peer("recv", from, options_.rank, options_.world_size);
  const Moved moved(out.dtype);
  run("ncclRecv", [&] {
    return library_.call.Recv(out.data, moved.count(out.num_elements()), moved.type, from, comm_,
                              options_.queue.stream);
  });
}

void NcclCommunicator::wait() {
  const Deadline until = deadline();
  for (Pause pause;; pause.take()) {
    check();
    if (options_.queue.is_done()) return;
    if (steady_clock::now() >= until)
      fail(concat("what was asked for is not done within ", options_.timeout.count(),
                  " ms; a rank may be gone, or may not have made the call"));
  }
}

void NcclCommunicator::barrier() {
  all_reduce(Tensor(token_.data(), DType::kF32, {1}), Reduction::kSum);
  wait();
}

void NcclCommunicator::check() { has_settled("an exchange"); }

void NcclCommunicator::abort() noexcept {
  const std::scoped_lock lock(mutex_);
  if (comm_ == nullptr) return;
  if (ended_by_.empty()) ended_by_ = "it was aborted";
  library_.call.CommAbort(std::exchange(comm_, nullptr));
}

}  // namespace llmserve
