#include "comm/nccl_communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

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

int type_of(DType dtype) {
  if (dtype == DType::kF32) return nccl::kFloat32;
  return dtype == DType::kBF16 ? nccl::kBfloat16 : nccl::kFloat16;
}

int op_of(Reduction reduction) { return reduction == Reduction::kSum ? nccl::kSum : nccl::kMax; }

size_t count_of(const ConstTensor& tensor) { return static_cast<size_t>(tensor.num_elements()); }

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
  if (result != nccl::kSuccess && result != nccl::kInProgress)
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
  if (result != nccl::kSuccess && result != nccl::kInProgress)
    fail(concat(what, ": ", library_.call.GetErrorString(result)));
  settle(what, deadline());
}

void NcclCommunicator::all_reduce(const Tensor& data, Reduction reduction) {
  check_reduced("all_reduce", data);
  run("ncclAllReduce", [&] {
    return library_.call.AllReduce(data.data, data.data, count_of(data), type_of(data.dtype),
                                   op_of(reduction), comm_, options_.queue.stream);
  });
}

void NcclCommunicator::all_gather(const ConstTensor& x, const Tensor& out) {
  check_parts("all_gather", x, out, options_.world_size);
  run("ncclAllGather", [&] {
    return library_.call.AllGather(x.data, out.data, count_of(x), type_of(x.dtype), comm_,
                                   options_.queue.stream);
  });
}

void NcclCommunicator::reduce_scatter(const ConstTensor& x, const Tensor& out,
                                      Reduction reduction) {
  check_parts("reduce_scatter", out, x, options_.world_size);
  run("ncclReduceScatter", [&] {
    return library_.call.ReduceScatter(x.data, out.data, count_of(out), type_of(x.dtype),
                                       op_of(reduction), comm_, options_.queue.stream);
  });
}

void NcclCommunicator::broadcast(const Tensor& data, int root) {
  check_reduced("broadcast", data);
  if (root < 0 || root >= options_.world_size)
    throw InvalidArgument(
        concat("broadcast: expected root in [0, ", options_.world_size, "), got ", root));
  run("ncclBroadcast", [&] {
    return library_.call.Broadcast(data.data, data.data, count_of(data), type_of(data.dtype), root,
                                   comm_, options_.queue.stream);
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
