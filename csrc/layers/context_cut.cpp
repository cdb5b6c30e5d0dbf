#include "layers/context_cut.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr size_t kMostRanks = 64;
constexpr int64_t kAddressBytes = sizeof(const void*);
// Floats that ranks show each other of a step, 16 MiB: fifteen sequences of 16,384 tokens whose 32
// heads of 128 two ranks share. What does not fit, each rank does by itself.
constexpr int64_t kRoom = 4 << 20;

// The rows of the ranks from `first` on.
RankRows rows_from(const TensorRank& rank, int64_t first, int64_t num_heads, int64_t num_kv_heads) {
  RankRows rows;
  std::vector<int64_t> heads;  // the first of each
  for (int64_t i = 0; i < rank.context_size; ++i) {
    TensorRank other = rank;
    other.rank = static_cast<int32_t>(first + i);
    const HeadCut cut(other, num_heads, num_kv_heads);
    const auto same = std::ranges::find(heads, cut.first_head);
    if (same != heads.end()) {
      rows.runs.push_back(rows.runs[static_cast<size_t>(same - heads.begin())]);
    } else {
      rows.runs.push_back({rows.count, cut.num_heads});
      rows.count += cut.num_heads;
    }
    heads.push_back(cut.first_head);
  }
  return rows;
}

// Who shows the others where something of it is.
class MeetingRanks final : public AttentionRanks {
 public:
  MeetingRanks(const RankRows& rows, const Tensor& room, Communicator& ranks, int64_t first)
      : AttentionRanks(rows, room), ranks_(ranks), first_(static_cast<size_t>(first)) {}

  std::span<const void* const> meet(const void* mine) override {
    ranks_.all_gather(Tensor(&mine, DType::kU8, {kAddressBytes}),
                      Tensor(all_.data(), DType::kU8, {kAddressBytes * ranks_.world_size()}));
    return std::span(all_).subspan(first_, rows().runs.size());
  }

 private:
  Communicator& ranks_;
  const size_t first_;
  std::array<const void*, kMostRanks> all_{};
};

}  // namespace

ContextCut::ContextCut(const TensorRank& rank, int64_t num_heads, int64_t num_kv_heads) {
  if (rank.context_size == 1) return;
  check_internal(static_cast<size_t>(rank.size) <= kMostRanks && rank.size % rank.context_size == 0,
                 "ranks share a context in groups of one size");
  first_rank_ = rank.rank - rank.rank % rank.context_size;
  rows_ = rows_from(rank, first_rank_, num_heads, num_kv_heads);
  rows_.rank = rank.rank - first_rank_;
  for (int64_t first = 0; first < rank.size; first += rank.context_size)
    rows_.most = std::max(rows_.most, rows_from(rank, first, num_heads, num_kv_heads).count);
}

void ContextCut::attend(const ForwardContext& context, PagedAttentionArgs args) const {
  if (rows_.runs.empty()) return context.backend.paged_attention(args);
  // The layer's scope has the room, until it has gathered what was attended: others read it longer
  // than this rank.
  MeetingRanks ranks(rows_, context.arena.allocate(DType::kF32, {kRoom}), context.groups.tp,
                     first_rank_);
  args.ranks = &ranks;
  context.backend.paged_attention(args);
}

int64_t ContextCut::workspace_bytes() const {
  return rows_.runs.empty() ? 0 : Arena::footprint_bytes(DType::kF32, {kRoom});
}

bool keeps_one_kv_head(const TensorRank& rank, int64_t num_heads, int64_t num_kv_heads) {
  TensorRank other = rank;
  int64_t kept = 0;  // of the first of its group
  for (other.rank = 0; other.rank < rank.size; ++other.rank) {
    const HeadCut cut(other, num_heads, num_kv_heads);
    if (other.rank % rank.context_size == 0) kept = cut.first_kv_head;
    if (cut.num_kv_heads != 1 || cut.first_kv_head != kept) return false;
  }
  return true;
}

}  // namespace llmserve
