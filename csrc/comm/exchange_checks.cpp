#include "comm/exchange_checks.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace llmserve {
namespace {

Parts even_parts(int64_t num_elements, int world_size) {
  Parts parts{.is_even = true};
  for (int rank = 0; rank <= world_size; ++rank)
    parts.begins.push_back(num_elements / world_size * rank);
  return parts;
}

Parts parts_of(const char* op, Communicator::Counts counts, int world_size) {
  if (std::ssize(counts) != world_size)
    throw InvalidArgument(
        concat(op, ": expected ", world_size, " counts, one a rank, got ", counts.size()));
  Parts parts{.begins = {0}};
  for (const int64_t count : counts) {
    if (count < 0) throw InvalidArgument(concat(op, ": expected counts of 0 or more, got ", count));
    parts.begins.push_back(parts.begins.back() + count);
  }
  return parts;
}

void check_alike(const char* op, const ConstTensor& a, const ConstTensor& b) {
  if (a.dtype != b.dtype)
    throw InvalidArgument(
        concat(op, ": expected tensors of one dtype, got ", describe(a), " and ", describe(b)));
}

// Without elements there are no strides to speak of.
bool lies_together(const ConstTensor& data) {
  return data.num_elements() == 0 || data.is_contiguous();
}

void check_size(const char* op, const char* what, const ConstTensor& tensor, int64_t expected) {
  if (tensor.num_elements() != expected)
    throw InvalidArgument(concat(op, ": expected ", expected, " elements ", what,
                                 " by the counts, got ", describe(tensor)));
}

}  // namespace

void check_moved(const char* op, const ConstTensor& data) {
  if (!lies_together(data))
    throw InvalidArgument(concat(op, ": expected a contiguous tensor, got ", describe(data)));
}

void check_reduced(const char* op, const ConstTensor& data) {
  const bool is_known = data.dtype == DType::kF32 || data.dtype == DType::kBF16 ||
                        data.dtype == DType::kF16 || data.dtype == DType::kI32;
  if (!is_known || !lies_together(data))
    throw InvalidArgument(
        concat(op, ": expected a contiguous tensor in float32, bfloat16, float16 or int32, got ",
               describe(data)));
}

void check_root(const char* op, int root, int world_size) {
  if (root < 0 || root >= world_size)
    throw InvalidArgument(concat(op, ": expected root in [0, ", world_size, "), got ", root));
}

void check_peer(const char* op, int peer, int rank, int world_size) {
  if (peer < 0 || peer >= world_size || peer == rank)
    throw InvalidArgument(
        concat(op, ": expected another rank than ", rank, " in [0, ", world_size, "), got ", peer));
}

Parts check_parts(const char* op, const ConstTensor& part, const ConstTensor& whole, int rank,
                  int world_size, Communicator::Counts counts) {
  check_moved(op, part);
  check_moved(op, whole);
  check_alike(op, part, whole);
  if (!counts.empty()) {
    Parts parts = parts_of(op, counts, world_size);
    check_size(op, "of this rank", part, parts.count(rank));
    check_size(op, "of all ranks", whole, parts.begins.back());
    return parts;
  }
  if (part.num_elements() * world_size == whole.num_elements())
    return even_parts(whole.num_elements(), world_size);
  throw InvalidArgument(concat(op, ": expected ", world_size, " times the elements of ",
                               describe(part), ", got ", describe(whole)));
}

void check_columns(const ConstTensor& x, const Tensor& out, int rank, int world_size,
                   Communicator::Counts counts, int to) {
  constexpr const char* kOp = "gather_columns";
  if (to != Communicator::kAll) check_root(kOp, to, world_size);
  if (std::ssize(counts) != world_size || std::ranges::any_of(counts, [](auto n) { return n < 0; }))
    throw InvalidArgument(concat(kOp, ": expected ", world_size,
                                 " counts of 0 or more, one a rank, got ", counts.size()));
  const auto is_matrix = [](const ConstTensor& t, int64_t columns) {
    return t.rank == 2 && t.shape[1] == columns &&
           (t.num_elements() < 2 || columns < 2 || t.strides[1] == 1);
  };
  const int64_t own = counts[static_cast<size_t>(rank)];
  if (!is_matrix(x, own))
    throw InvalidArgument(concat(kOp, ": expected rows of ", own, " columns, got ", describe(x)));
  if (to != Communicator::kAll && to != rank) return;
  const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (!is_matrix(out, all) || out.shape[0] != x.shape[0])
    throw InvalidArgument(concat(kOp, ": expected ", x.shape[0], " rows of ", all,
                                 " columns to gather in, got ", describe(out)));
  check_alike(kOp, x, out);
}

ExchangedParts check_exchange(const ConstTensor& x, const Tensor& out, int rank, int world_size,
                              Communicator::Counts send_counts,
                              Communicator::Counts receive_counts) {
  constexpr const char* kOp = "all_to_all";
  check_moved(kOp, x);
  check_moved(kOp, out);
  check_alike(kOp, x, out);
  if (send_counts.empty() && receive_counts.empty()) {
    if (x.num_elements() != out.num_elements() || x.num_elements() % world_size != 0)
      throw InvalidArgument(
          concat(kOp, ": expected two tensors of as many elements, a multiple of ", world_size,
                 ", or counts, got ", describe(x), " and ", describe(out)));
    return {even_parts(x.num_elements(), world_size), even_parts(x.num_elements(), world_size)};
  }
  ExchangedParts parts{parts_of(kOp, send_counts, world_size),
                       parts_of(kOp, receive_counts, world_size)};
  check_size(kOp, "to send", x, parts.sent.begins.back());
  check_size(kOp, "to receive", out, parts.received.begins.back());
  if (parts.sent.count(rank) != parts.received.count(rank))
    throw InvalidArgument(concat(kOp, ": rank ", rank, " sends itself ", parts.sent.count(rank),
                                 " elements and receives ", parts.received.count(rank)));
  return parts;
}

}  // namespace llmserve
