#include "comm/tcp_communicator.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "comm/exchange_checks.h"
#include "comm/host_reduction.h"
#include "core/spin_pause.h"
#include "core/thread_beat.h"

namespace llmserve {
namespace {

// What a small part takes over a loopback, after which a thread sleeps: 10 µs or so.
constexpr int kLooksBeforeSleep = 20;
// Of less than this, what a second round saves at 10 Gbit/s takes less than its own 50 µs.
constexpr size_t kMinBytesInParts = 64 << 10;

std::byte* at(void* data, int64_t element, DType dtype) {
  return static_cast<std::byte*>(data) + element * size_bytes(dtype);
}
const std::byte* at(const void* data, int64_t element, DType dtype) {
  return static_cast<const std::byte*>(data) + element * size_bytes(dtype);
}

Bytes bytes_at(const void* data, int64_t begin, int64_t count, DType dtype) {
  return {at(data, begin, dtype), static_cast<size_t>(count * size_bytes(dtype))};
}
std::span<std::byte> bytes_at(void* data, int64_t begin, int64_t count, DType dtype) {
  return {at(data, begin, dtype), static_cast<size_t>(count * size_bytes(dtype))};
}

void copy(std::span<std::byte> to, Bytes from) {
  if (!from.empty() && to.data() != from.data()) std::memmove(to.data(), from.data(), from.size());
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_socket_pairs(int world_size,
                                                             std::chrono::milliseconds timeout) {
  const auto size = static_cast<size_t>(world_size);
  std::vector<std::vector<std::unique_ptr<RankLink>>> links(size);
  for (auto& row : links) row.resize(size);
  for (size_t a = 0; a < size; ++a)
    for (size_t b = a + 1; b < size; ++b)
      std::tie(links[a][b], links[b][a]) = RankLink::make_pair();
  std::vector<std::unique_ptr<Communicator>> ends;
  for (int rank = 0; rank < world_size; ++rank)
    ends.push_back(std::make_unique<TcpCommunicator>(
        rank, std::move(links[static_cast<size_t>(rank)]), timeout));
  return ends;
}

TcpCommunicator::TcpCommunicator(int rank, std::vector<std::unique_ptr<RankLink>> links,
                                 std::chrono::milliseconds timeout)
    : rank_(rank), links_(std::move(links)), timeout_(timeout), parts_(links_.size()) {}

std::string TcpCommunicator::description() const {
  return concat("sockets, rank ", rank_, " of ", world_size());
}

std::byte* TcpCommunicator::staging(size_t num_bytes) {
  if (staging_.size() < num_bytes) staging_.resize(num_bytes);
  return staging_.data();
}

std::vector<TcpCommunicator::Part>& TcpCommunicator::fresh_parts() {
  std::ranges::fill(parts_, Part());
  return parts_;
}

void TcpCommunicator::check() {
  if (!failure_.empty()) throw DeviceError(failure_);
}

bool TcpCommunicator::has_lost_peer() const {
  const auto now = std::chrono::steady_clock::now();
  return std::ranges::any_of(links_,
                             [&](const auto& link) { return link && link->is_readable(now); });
}

void TcpCommunicator::abort() noexcept {
  for (const auto& link : links_)
    if (link) link->cancel();
}

void TcpCommunicator::exchange(RankOp op, DType dtype, std::span<const Part> parts) {
  check();
  try {
    advance_all(op, dtype, parts);
  } catch (const std::exception& error) {
    failure_ = concat("exchange among ranks failed on rank ", rank_, " of ", world_size(), ", ",
                      name(op), ": ", error.what());
    abort();
    throw DeviceError(failure_);
  }
}

void TcpCommunicator::advance_all(RankOp op, DType dtype, std::span<const Part> parts) {
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (!links_[rank]) continue;
    links_[rank]->begin({.op = op,
                         .dtype = dtype,
                         .sends = parts[rank].sends,
                         .receives = parts[rank].receives,
                         .out = parts[rank].out,
                         .in = parts[rank].in});
  }
  const auto until = std::chrono::steady_clock::now() + timeout_;
  std::vector<pollfd> waited(parts.size());
  for (int looks = 0;; ++looks) {
    size_t num_waited = 0;
    size_t late = 0;
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      if (!links_[rank]) continue;
      const short events = advance(rank);
      if (events == 0) continue;
      late = rank;
      waited[num_waited++] = {.fd = links_[rank]->fd(), .events = events, .revents = 0};
    }
    if (num_waited == 0) return;
    if (looks < kLooksBeforeSleep) {
      spin_pause();
      continue;
    }
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    if (left.count() <= 0)
      throw DeviceError(concat("rank ", late, " has not come within ", timeout_.count(), " ms"));
    const BeatPause pause;
    poll(waited.data(), num_waited, static_cast<int>(std::min<int64_t>(left.count(), 3'600'000)));
  }
}

short TcpCommunicator::advance(size_t rank) {
  try {
    return links_[rank]->advance();
  } catch (const DeviceError& error) {
    throw DeviceError(concat("rank ", rank, ": ", error.what()));
  }
}

// In float32, in the order of the ranks, rounded once; the others' lie in the staging memory one
// after another.
void TcpCommunicator::reduce(const std::byte* mine, DType dtype, int64_t count, Reduction reduction,
                             std::byte* out) {
  const auto num_bytes = static_cast<size_t>(count * size_bytes(dtype));
  std::vector<const void*> all;
  const std::byte* next = staging_.data();
  for (int rank = 0; rank < world_size(); ++rank) {
    all.push_back(rank == rank_ ? mine : next);
    if (rank != rank_) next += num_bytes;
  }
  reduce_in_order(all, dtype, reduction, 0, count,
                  [&](const void* results, int64_t done, int64_t length) {
                    std::memcpy(out + done * size_bytes(dtype), results,
                                static_cast<size_t>(length * size_bytes(dtype)));
                  });
}

void TcpCommunicator::all_reduce(const Tensor& data, Reduction reduction) {
  check_reduced("all_reduce", data);
  const Bytes mine =
      bytes_at(static_cast<const void*>(data.data), 0, data.num_elements(), data.dtype);
  if (world_size() > 2 && mine.size() >= kMinBytesInParts) return reduce_in_parts(data, reduction);
  std::byte* next = staging(mine.size() * links_.size());
  std::vector<Part>& parts = fresh_parts();
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == rank_) continue;
    parts[static_cast<size_t>(rank)] = {
        .sends = true, .receives = true, .out = mine, .in = {next, mine.size()}};
    next += mine.size();
  }
  exchange(RankOp::kAllReduce, data.dtype, parts);
  reduce(mine.data(), data.dtype, data.num_elements(), reduction,
         static_cast<std::byte*>(data.data));
}

void TcpCommunicator::reduce_in_parts(const Tensor& data, Reduction reduction) {
  const int64_t count = data.num_elements();
  const auto begin = [&](int rank) { return count * rank / world_size(); };
  const auto part_of = [&](int rank) {
    return bytes_at(data.data, begin(rank), begin(rank + 1) - begin(rank), data.dtype);
  };
  const std::span<std::byte> own = part_of(rank_);
  std::byte* next = staging(own.size() * links_.size());
  std::vector<Part>& parts = fresh_parts();
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == rank_) continue;
    parts[static_cast<size_t>(rank)] = {
        .sends = true, .receives = true, .out = part_of(rank), .in = {next, own.size()}};
    next += own.size();
  }
  exchange(RankOp::kAllReduce, data.dtype, parts);
  reduce(own.data(), data.dtype, begin(rank_ + 1) - begin(rank_), reduction, own.data());
  for (int rank = 0; rank < world_size(); ++rank)
    parts[static_cast<size_t>(rank)] = {
        .sends = true, .receives = true, .out = own, .in = part_of(rank)};
  exchange(RankOp::kAllReduce, data.dtype, parts);
}

void TcpCommunicator::all_gather(const ConstTensor& x, const Tensor& out, Counts counts) {
  const Parts whole = check_parts("all_gather", x, out, rank_, world_size(), counts);
  const Bytes mine = bytes_at(x.data, 0, x.num_elements(), x.dtype);
  std::vector<Part>& parts = fresh_parts();
  for (int rank = 0; rank < world_size(); ++rank)
    parts[static_cast<size_t>(rank)] = {
        .sends = true,
        .receives = true,
        .out = mine,
        .in = bytes_at(out.data, whole.begin(rank), whole.count(rank), x.dtype)};
  copy(parts[static_cast<size_t>(rank_)].in, mine);
  exchange(RankOp::kAllGather, x.dtype, parts);
}

// One row lies in its place as it comes; of several each rank's come together, and are laid out.
void TcpCommunicator::gather_columns(const ConstTensor& x, const Tensor& out, Counts counts,
                                     int to) {
  check_columns(x, out, rank_, world_size(), counts, to);
  const bool gets = to == kAll || to == rank_;
  const int64_t num_rows = x.shape[0];
  const DType dtype = x.dtype;
  const int64_t mine = counts[static_cast<size_t>(rank_)];
  const auto row_bytes = static_cast<size_t>(mine * size_bytes(dtype));
  Bytes sent = bytes_at(x.data, 0, num_rows * mine, dtype);
  if (num_rows > 1 && mine > 0 && x.strides[0] != mine) {
    packed_.resize(row_bytes * static_cast<size_t>(num_rows));
    for (int64_t row = 0; row < num_rows; ++row)
      std::memcpy(packed_.data() + static_cast<size_t>(row) * row_bytes,
                  at(x.data, row * x.strides[0], dtype), row_bytes);
    sent = packed_;
  }
  const bool is_direct = num_rows <= 1;
  std::byte* next = nullptr;
  if (gets && !is_direct) next = staging(static_cast<size_t>(out.num_bytes()));
  std::vector<Part>& parts = fresh_parts();
  int64_t column = 0;
  for (int rank = 0; rank < world_size(); ++rank) {
    Part& part = parts[static_cast<size_t>(rank)];
    const int64_t count = counts[static_cast<size_t>(rank)];
    part.sends = to == kAll || to == rank;
    part.out = sent;
    part.receives = gets;
    if (gets) {
      const auto num_bytes = static_cast<size_t>(num_rows * count * size_bytes(dtype));
      part.in = is_direct ? bytes_at(out.data, column, num_rows * count, dtype)
                          : std::span(next, num_bytes);
      if (!is_direct) next += num_bytes;
    }
    column += count;
  }
  exchange(RankOp::kGatherColumns, dtype, parts);
  if (!gets) return;
  if (is_direct) {
    copy(parts[static_cast<size_t>(rank_)].in, sent);
    return;
  }
  column = 0;
  for (int rank = 0; rank < world_size(); ++rank) {
    const int64_t count = counts[static_cast<size_t>(rank)];
    const Bytes from = rank == rank_ ? sent : Bytes(parts[static_cast<size_t>(rank)].in);
    const auto width = static_cast<size_t>(count * size_bytes(dtype));
    for (int64_t row = 0; width > 0 && row < num_rows; ++row)
      copy(bytes_at(out.data, row * out.strides[0] + column, count, dtype),
           from.subspan(static_cast<size_t>(row) * width, width));
    column += count;
  }
}

void TcpCommunicator::reduce_scatter(const ConstTensor& x, const Tensor& out, Reduction reduction,
                                     Counts counts) {
  check_reduced("reduce_scatter", x);
  const Parts whole = check_parts("reduce_scatter", out, x, rank_, world_size(), counts);
  const auto mine = static_cast<size_t>(whole.count(rank_) * size_bytes(x.dtype));
  std::byte* next = staging(mine * links_.size());
  std::vector<Part>& parts = fresh_parts();
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == rank_) continue;
    parts[static_cast<size_t>(rank)] = {
        .sends = true,
        .receives = true,
        .out = bytes_at(x.data, whole.begin(rank), whole.count(rank), x.dtype),
        .in = {next, mine}};
    next += mine;
  }
  exchange(RankOp::kReduceScatter, x.dtype, parts);
  reduce(at(x.data, whole.begin(rank_), x.dtype), x.dtype, whole.count(rank_), reduction,
         static_cast<std::byte*>(out.data));
}

void TcpCommunicator::all_to_all(const ConstTensor& x, const Tensor& out, Counts send_counts,
                                 Counts receive_counts) {
  const ExchangedParts moved =
      check_exchange(x, out, rank_, world_size(), send_counts, receive_counts);
  std::vector<Part>& parts = fresh_parts();
  for (int rank = 0; rank < world_size(); ++rank)
    parts[static_cast<size_t>(rank)] = {
        .sends = true,
        .receives = true,
        .out = bytes_at(x.data, moved.sent.begin(rank), moved.sent.count(rank), x.dtype),
        .in = bytes_at(out.data, moved.received.begin(rank), moved.received.count(rank), x.dtype)};
  const Part& own = parts[static_cast<size_t>(rank_)];
  copy(own.in, own.out);
  exchange(RankOp::kAllToAll, x.dtype, parts);
}

void TcpCommunicator::broadcast(const Tensor& data, int root) {
  check_moved("broadcast", data);
  check_root("broadcast", root, world_size());
  const std::span<std::byte> all = bytes_at(data.data, 0, data.num_elements(), data.dtype);
  std::vector<Part>& parts = fresh_parts();
  for (int rank = 0; rank < world_size(); ++rank)
    if (rank_ == root || rank == root)
      parts[static_cast<size_t>(rank)] = {
          .sends = rank_ == root, .receives = rank_ != root, .out = all, .in = all};
  exchange(RankOp::kBroadcast, data.dtype, parts);
}

void TcpCommunicator::send(const ConstTensor& x, int to) {
  check_moved("send", x);
  check_peer("send", to, rank_, world_size());
  std::vector<Part>& parts = fresh_parts();
  parts[static_cast<size_t>(to)] = {.sends = true,
                                    .out = bytes_at(x.data, 0, x.num_elements(), x.dtype)};
  exchange(RankOp::kSend, x.dtype, parts);
}

void TcpCommunicator::recv(const Tensor& out, int from) {
  check_moved("recv", out);
  check_peer("recv", from, rank_, world_size());
  std::vector<Part>& parts = fresh_parts();
  parts[static_cast<size_t>(from)] = {.receives = true,
                                      .in = bytes_at(out.data, 0, out.num_elements(), out.dtype)};
  exchange(RankOp::kSend, out.dtype, parts);
}

void TcpCommunicator::barrier() {
  std::vector<Part>& parts = fresh_parts();
  for (Part& part : parts) part = {.sends = true, .receives = true};
  exchange(RankOp::kBarrier, DType::kU8, parts);
}

}  // namespace llmserve
