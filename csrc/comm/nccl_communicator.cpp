#include "comm/nccl_communicator.h"

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>

#include "comm/exchange_checks.h"
#include "core/error.h"
#include "core/spin_pause.h"

namespace llmserve {
namespace {

using std::chrono::steady_clock;

// For the others to hear that this rank leaves.
constexpr std::chrono::seconds kFarewell(10);

// Between two looks: none at first, since NCCL's own thread takes a call in within microseconds and
// a sleep is fifty; then longer and longer.
class Pause {
 public:
  void take() {
    constexpr int kSpins = 2000;
    if (num_looks_++ < kSpins) return spin_pause();
    std::this_thread::sleep_for(length_);
    length_ = std::min(2 * length_, std::chrono::microseconds(1000));
  }

 private:
  int num_looks_ = 0;
  std::chrono::microseconds length_{20};
};

int reduced_type(DType dtype) {
  if (dtype == DType::kI32) return nccl::kInt32;
  if (dtype == DType::kF32) return nccl::kFloat32;
  return dtype == DType::kBF16 ? nccl::kBfloat16 : nccl::kFloat16;
}

// How NCCL is told of elements that are only moved: other types than floats go as their bytes.
struct Moved {
  explicit Moved(DType dtype)
      : is_float(dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16),
        element_bytes(size_bytes(dtype)),
        type(is_float ? reduced_type(dtype) : nccl::kInt8) {}
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
  if (options_.staging_bytes > 0) staging(options_.staging_bytes);
  nccl::Config config;
  config.blocking = 0;
  const nccl::Result result = library_.call.CommInitRankConfig(&comm_, options_.world_size,
                                                               options_.id, options_.rank, &config);
  if (has_failed(result))
    fail(concat("ncclCommInitRankConfig: ", library_.call.GetErrorString(result)));
  settle("ncclCommInitRankConfig", deadline());
}

NcclCommunicator::~NcclCommunicator() {
  {
    const std::scoped_lock aborted(abort_mutex_);
  }
  if (comm_ == nullptr) return;
  try {
    forget_recorded();
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
  if (comm_ == nullptr || !ended_by_.empty())
    throw DeviceError(concat("the communicator of ", who(), " has ended: ", ended_by_));
}

void NcclCommunicator::fail(const std::string& problem) {
  {
    const std::scoped_lock lock(mutex_);
    const bool is_news = ended_by_.empty();
    if (is_news) ended_by_ = problem;
    const bool is_first = !options_.has_failed->exchange(true);
    if (is_news && is_first && options_.num_errors) ++*options_.num_errors;
  }
  // NCCL ends a communicator when no graph has it any more, and the graph that is recorded is this
  // thread's: the next call throws, too, and whoever calls then aborts.
  if (!options_.queue.is_recorded || !options_.queue.is_recorded()) abort();
  throw DeviceError(concat("exchange among GPUs failed on ", who(), ": ", problem));
}

void NcclCommunicator::fail_with_others() {
  if (*options_.has_failed) fail("another rank has failed");
  if (options_.has_lost_rank && options_.has_lost_rank()) fail("a rank of another node has gone");
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
    fail_with_others();
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
  if (options_.queue.mark) options_.queue.mark();
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
                                   reduced_type(data.dtype), op_of(reduction), comm_,
                                   options_.queue.stream);
  });
}

std::byte* NcclCommunicator::staging(int64_t num_bytes) {
  if (staging_.empty() || staging_.back().num_bytes() < num_bytes)
    staging_.emplace_back(num_bytes, *options_.memory);
  return staging_.back().data();
}

void NcclCommunicator::copy_rows(const RowCopy& copy) {
  if (copy.row_bytes > 0 && copy.num_rows > 0) options_.queue.copy_rows(copy);
}

void NcclCommunicator::share_parts(std::byte* whole, const std::vector<int64_t>& counts,
                                   DType dtype) {
  const Moved moved(dtype);
  const auto own = static_cast<size_t>(options_.rank);
  if (std::ranges::all_of(counts, [&](int64_t count) { return count == counts[0]; })) {
    const std::byte* from = whole + counts[0] * options_.rank * size_bytes(dtype);
    run("ncclAllGather", [&] {
      return library_.call.AllGather(from, whole, moved.count(counts[own]), moved.type, comm_,
                                     options_.queue.stream);
    });
    return;
  }
  run_group("ncclBroadcast", [&](const Note& note) {
    std::byte* part = whole;
    for (int root = 0; root < options_.world_size; ++root) {
      const int64_t count = counts[static_cast<size_t>(root)];
      if (count > 0)
        note(library_.call.Broadcast(part, part, moved.count(count), moved.type, root, comm_,
                                     options_.queue.stream));
      part += count * size_bytes(dtype);
    }
  });
}

void NcclCommunicator::collect_parts(const std::byte* own, std::byte* whole,
                                     const std::vector<int64_t>& counts, DType dtype, int to) {
  const Moved moved(dtype);
  const int64_t own_count = counts[static_cast<size_t>(options_.rank)];
  if (to != options_.rank && own_count == 0) return;
  run_group("ncclSend and ncclRecv", [&](const Note& note) {
    if (to != options_.rank) {
      note(library_.call.Send(own, moved.count(own_count), moved.type, to, comm_,
                              options_.queue.stream));
      return;
    }
    std::byte* part = whole;
    for (int from = 0; from < options_.world_size; ++from) {
      const int64_t count = counts[static_cast<size_t>(from)];
      if (from != to && count > 0)
        note(library_.call.Recv(part, moved.count(count), moved.type, from, comm_,
                                options_.queue.stream));
      part += count * size_bytes(dtype);
    }
  });
}

// One row lies in its place as it comes. Of several each rank's columns go together, and are laid
// out where they arrive.
void NcclCommunicator::gather_columns(const ConstTensor& x, const Tensor& out, Counts counts,
                                      int to) {
  check_columns(x, out, options_.rank, options_.world_size, counts, to);
  const int64_t num_rows = x.shape[0];
  if (num_rows == 0) return;
  const int64_t width = size_bytes(x.dtype);
  const bool is_direct = num_rows == 1;
  const bool gets = to == kAll || to == options_.rank;
  std::vector<int64_t> part_counts;
  for (const int64_t count : counts) part_counts.push_back(count * num_rows);
  const int64_t own_begin =
      std::accumulate(counts.begin(), counts.begin() + options_.rank, int64_t{0});
  const int64_t own_bytes = counts[static_cast<size_t>(options_.rank)] * width;
  const auto* own = static_cast<const std::byte*>(x.data);
  auto* const result = gets ? static_cast<std::byte*>(out.data) : nullptr;
  std::byte* whole = result;
  if (!is_direct) {
    const int64_t all = std::accumulate(part_counts.begin(), part_counts.end(), int64_t{0});
    whole = staging(all * width);
    std::byte* packed = whole + own_begin * num_rows * width;
    copy_rows({.to = packed,
               .to_stride = own_bytes,
               .from = own,
               .from_stride = x.strides[0] * width,
               .row_bytes = own_bytes,
               .num_rows = num_rows});
    own = packed;
  } else if (gets && result + own_begin * width != own) {
    copy_rows({.to = result + own_begin * width,
               .to_stride = own_bytes,
               .from = own,
               .from_stride = own_bytes,
               .row_bytes = own_bytes,
               .num_rows = 1});
  }
  if (to == kAll) {
    share_parts(whole, part_counts, x.dtype);
  } else {
    collect_parts(own, whole, part_counts, x.dtype, to);
  }
  if (is_direct || !gets) return;
  int64_t column = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    std::byte* const place = result + column * width;
    const bool is_there = static_cast<int>(rank) == options_.rank && place == x.data;
    if (!is_there)
      copy_rows({.to = place,
                 .to_stride = out.strides[0] * width,
                 .from = whole + column * num_rows * width,
                 .from_stride = counts[rank] * width,
                 .row_bytes = counts[rank] * width,
                 .num_rows = num_rows});
    column += counts[rank];
  }
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
  const int type = reduced_type(x.dtype);
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
    fail_with_others();
    if (steady_clock::now() >= until)
      fail(concat("what was asked for is not done within ", options_.timeout.count(),
                  " ms; a rank may be gone, or may not have made the call"));
  }
}

void NcclCommunicator::barrier() {
  all_reduce(Tensor(token_.data(), DType::kF32, {1}), Reduction::kSum);
  wait();
}

void NcclCommunicator::check() {
  has_settled("an exchange");
  if (options_.has_lost_rank) fail_with_others();
}

// NCCL ends a communicator when no graph has it any more. A rank that captures one at this moment
// finds in its next call that the communicator has ended, and leaves the graph.
void NcclCommunicator::abort() noexcept {
  std::unique_lock lock(mutex_);
  if (comm_ == nullptr) return;
  if (ended_by_.empty()) ended_by_ = "it was aborted";
  if (options_.leave) options_.leave();
  const nccl::Comm comm = std::exchange(comm_, nullptr);
  const std::scoped_lock aborting(abort_mutex_);
  lock.unlock();
  forget_recorded();
  library_.call.CommAbort(comm);
}

void NcclCommunicator::forget_recorded() const {
  if (options_.queue.forget) options_.queue.forget();
}

}  // namespace llmserve
