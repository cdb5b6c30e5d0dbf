#include "comm/shm_communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/host_reduction.h"
#include "core/error.h"

namespace llmserve {
namespace {

// Elements that one thread copies in about the time in which it wakes others, a few times over.
constexpr int64_t kCopiedAlone = 1 << 17;

// The ranks' data, at the place that they have called with.
std::vector<const void*> sources(const ShmGroup& group) {
  std::vector<const void*> from;
  for (int rank = 0; rank < group.world_size(); ++rank) from.push_back(group.call_of(rank).from);
  return from;
}

std::byte* at(void* data, int64_t element, DType dtype) {
  return static_cast<std::byte*>(data) + element * size_bytes(dtype);
}
const std::byte* at(const void* data, int64_t element, DType dtype) {
  return static_cast<const std::byte*>(data) + element * size_bytes(dtype);
}

// Where a part lies in its place there is nothing to copy.
void copy(void* to, const void* from, int64_t count, DType dtype) {
  if (count > 0 && to != from)
    std::memcpy(to, from, static_cast<size_t>(count * size_bytes(dtype)));
}

std::string agree_on_size(const ShmCall& mine, const ShmCall& theirs) {
  return theirs.num_elements == mine.num_elements ? "" : concat(theirs.num_elements, " elements");
}

std::string agree_on_parts(const ShmCall& mine, const ShmCall& theirs) {
  return theirs.parts->begins == mine.parts->begins ? "" : "other counts";
}

std::string agree_on_columns(const ShmCall& mine, const ShmCall& theirs) {
  if (theirs.num_elements != mine.num_elements) return concat(theirs.num_elements, " rows");
  return std::ranges::equal(theirs.counts, mine.counts) ? "" : "other counts";
}

}  // namespace

ShmCommunicator::ShmCommunicator(std::shared_ptr<ShmGroup> group, int rank, HostThreads run)
    : group_(std::move(group)), rank_(rank), run_(std::move(run)) {}

ShmCommunicator::~ShmCommunicator() { group_->leave(rank_); }

std::string ShmCommunicator::description() const {
  return concat("threads of one process, rank ", rank_, " of ", world_size());
}

// Each rank reduces its blocks of all ranks' data and writes them to all: nobody else touches them.
void ShmCommunicator::all_reduce(const Tensor& data, Reduction reduction) {
  check_reduced("all_reduce", data);
  const ShmCall mine{.op = "all_reduce",
                     .dtype = data.dtype,
                     .from = data.data,
                     .to = data.data,
                     .num_elements = data.num_elements(),
                     .argument = static_cast<int>(reduction)};
  group_->exchange(
      rank_, mine, [&](int, const ShmCall& theirs) { return agree_on_size(mine, theirs); },
      [&] {
        const int64_t num_blocks = (mine.num_elements + kReducedAtOnce - 1) / kReducedAtOnce;
        const int64_t begin = num_blocks * rank_ / world_size() * kReducedAtOnce;
        const int64_t end =
            std::min(num_blocks * (rank_ + 1) / world_size() * kReducedAtOnce, mine.num_elements);
        reduce_in_order(sources(*group_), data.dtype, reduction, begin, end - begin,
                        [&](const void* results, int64_t done, int64_t count) {
                          for (int rank = 0; rank < world_size(); ++rank)
                            copy(at(group_->call_of(rank).to, begin + done, data.dtype), results,
                                 count, data.dtype);
                        });
      });
}

void ShmCommunicator::all_gather(const ConstTensor& x, const Tensor& out, Counts counts) {
  const Parts parts = check_parts("all_gather", x, out, rank_, world_size(), counts);
  const ShmCall mine{.op = "all_gather", .dtype = x.dtype, .from = x.data, .parts = &parts};
  group_->exchange(
      rank_, mine, [&](int, const ShmCall& theirs) { return agree_on_parts(mine, theirs); },
      [&] {
        for (int rank = 0; rank < world_size(); ++rank)
          copy(at(out.data, parts.begin(rank), x.dtype), group_->call_of(rank).from,
               parts.count(rank), x.dtype);
      });
}

void ShmCommunicator::gather_columns(const ConstTensor& x, const Tensor& out, Counts counts,
                                     int to) {
  check_columns(x, out, rank_, world_size(), counts, to);
  const ShmCall mine{.op = "gather_columns",
                     .dtype = x.dtype,
                     .from = x.data,
                     .num_elements = x.shape[0],
                     .argument = to,
                     .row_stride = x.strides[0],
                     .counts = counts};
  group_->exchange(
      rank_, mine, [&](int, const ShmCall& theirs) { return agree_on_columns(mine, theirs); },
      [&] {
        if (to != kAll && to != rank_) return;
        const auto copy_rows = [&](int64_t begin, int64_t end) {
          int64_t column = 0;
          for (int rank = 0; rank < world_size(); ++rank) {
            const ShmCall& theirs = group_->call_of(rank);
            const int64_t count = counts[static_cast<size_t>(rank)];
            for (int64_t row = begin; row < end; ++row)
              copy(at(out.data, row * out.strides[0] + column, x.dtype),
                   at(theirs.from, row * theirs.row_stride, x.dtype), count, x.dtype);
            column += count;
          }
        };
        if (run_ && out.num_elements() >= kCopiedAlone)
          run_(x.shape[0], copy_rows);
        else
          copy_rows(0, x.shape[0]);
      });
}

void ShmCommunicator::reduce_scatter(const ConstTensor& x, const Tensor& out, Reduction reduction,
                                     Counts counts) {
  check_reduced("reduce_scatter", x);
  const Parts parts = check_parts("reduce_scatter", out, x, rank_, world_size(), counts);
  const ShmCall mine{.op = "reduce_scatter",
                     .dtype = x.dtype,
                     .from = x.data,
                     .argument = static_cast<int>(reduction),
                     .parts = &parts};
  group_->exchange(
      rank_, mine, [&](int, const ShmCall& theirs) { return agree_on_parts(mine, theirs); },
      [&] {
        reduce_in_order(sources(*group_), x.dtype, reduction, parts.begin(rank_),
                        parts.count(rank_), [&](const void* results, int64_t done, int64_t count) {
                          copy(at(out.data, done, x.dtype), results, count, x.dtype);
                        });
      });
}

void ShmCommunicator::all_to_all(const ConstTensor& x, const Tensor& out, Counts send_counts,
                                 Counts receive_counts) {
  const ExchangedParts parts =
      check_exchange(x, out, rank_, world_size(), send_counts, receive_counts);
  const ShmCall mine{.op = "all_to_all",
                     .dtype = x.dtype,
                     .from = x.data,
                     .parts = &parts.sent,
                     .received = &parts.received};
  group_->exchange(
      rank_, mine,
      [&](int other, const ShmCall& theirs) -> std::string {
        const bool is_same = theirs.parts->count(rank_) == parts.received.count(other) &&
                             theirs.received->count(rank_) == parts.sent.count(other);
        return is_same ? "" : "other counts";
      },
      [&] {
        for (int rank = 0; rank < world_size(); ++rank) {
          const ShmCall& theirs = group_->call_of(rank);
          copy(at(out.data, parts.received.begin(rank), x.dtype),
               at(theirs.from, theirs.parts->begin(rank_), x.dtype), parts.received.count(rank),
               x.dtype);
        }
      });
}

void ShmCommunicator::broadcast(const Tensor& data, int root) {
  check_moved("broadcast", data);
  check_root("broadcast", root, world_size());
  const ShmCall mine{.op = "broadcast",
                     .dtype = data.dtype,
                     .from = data.data,
                     .num_elements = data.num_elements(),
                     .argument = root};
  group_->exchange(
      rank_, mine, [&](int, const ShmCall& theirs) { return agree_on_size(mine, theirs); },
      [&] { copy(data.data, group_->call_of(root).from, mine.num_elements, data.dtype); });
}

void ShmCommunicator::send(const ConstTensor& x, int to) {
  check_moved("send", x);
  check_peer("send", to, rank_, world_size());
  group_->send(rank_, to, x);
}

void ShmCommunicator::recv(const Tensor& out, int from) {
  check_moved("recv", out);
  check_peer("recv", from, rank_, world_size());
  group_->receive(from, rank_, out);
}

// A call like others, so that a rank which makes another one is found out.
void ShmCommunicator::barrier() {
  group_->exchange(rank_, {.op = "barrier"}, [](int, const ShmCall&) { return ""; }, [] {});
}

}  // namespace llmserve
