#include "engine/expert_moves.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "models/expert_layers.h"

namespace llmserve {
namespace {

constexpr int64_t kAlignment = 64;

// What a rank sends and receives of a layer, in an order that both ends agree on.
struct RankMoves {
  std::vector<ExpertMove> sent;      // by the rank that they go to
  std::vector<ExpertMove> received;  // by the rank that they come from
  std::vector<int64_t> send_counts;  // [W]
  std::vector<int64_t> receive_counts;
  int64_t most = 0;  // that any rank sends or receives
};

RankMoves moves_of(std::span<const ExpertMove> moves, int32_t rank, int32_t num_ranks) {
  RankMoves own{.send_counts = std::vector<int64_t>(static_cast<size_t>(num_ranks)),
                .receive_counts = std::vector<int64_t>(static_cast<size_t>(num_ranks))};
  std::vector<int64_t> num_sent(static_cast<size_t>(num_ranks));
  std::vector<int64_t> num_received(static_cast<size_t>(num_ranks));
  for (const ExpertMove& move : moves) {
    own.most = std::max({own.most, ++num_sent[static_cast<size_t>(move.from_rank)],
                         ++num_received[static_cast<size_t>(move.to_rank)]});
    if (move.from_rank == rank) {
      own.sent.push_back(move);
      ++own.send_counts[static_cast<size_t>(move.to_rank)];
    }
    if (move.to_rank == rank) {
      own.received.push_back(move);
      ++own.receive_counts[static_cast<size_t>(move.from_rank)];
    }
  }
  std::ranges::stable_sort(own.sent, {}, &ExpertMove::to_rank);
  std::ranges::stable_sort(own.received, {}, &ExpertMove::from_rank);
  return own;
}

std::vector<int64_t> times(std::vector<int64_t> counts, int64_t factor) {
  for (int64_t& count : counts) count *= factor;
  return counts;
}

void copy(const DeviceQueue& queue, std::byte* to, const std::byte* from, int64_t num_bytes) {
  queue.copy_rows({.to = to,
                   .to_stride = num_bytes,
                   .from = from,
                   .from_stride = num_bytes,
                   .row_bytes = num_bytes,
                   .num_rows = 1});
}

// Bytes [begin, begin + size) of a piece of all experts that move.
void exchange(const RankMoves& moves, const ExpertLinear& experts, size_t piece, int64_t begin,
              int64_t size, Communicator& ranks, const DeviceQueue& queue, Arena& arena) {
  const Arena::Scope scope(arena);
  const Tensor sent = arena.allocate(DType::kI8, {std::ssize(moves.sent) * size});
  const Tensor received = arena.allocate(DType::kI8, {std::ssize(moves.received) * size});
  const auto at = [&](int32_t place) { return experts.pieces(place)[piece].data() + begin; };
  auto* to = static_cast<std::byte*>(sent.data);
  for (const ExpertMove& move : moves.sent) {
    copy(queue, to, at(move.from_place), size);
    to += size;
  }
  ranks.all_to_all(sent, received, times(moves.send_counts, size),
                   times(moves.receive_counts, size));
  const auto* from = static_cast<const std::byte*>(received.data);
  for (const ExpertMove& move : moves.received) {
    copy(queue, at(move.to_place), from, size);
    from += size;
  }
}

}  // namespace

void move_experts(std::span<const ExpertBalancer::Moves> layers, const Model& model,
                  Communicator& ranks, const DeviceQueue& queue, Arena& arena,
                  int64_t staging_bytes) {
  const std::vector<RankExperts> experts = rank_experts(model);
  for (const auto& [layer_idx, all] : layers) {
    const auto layer = std::ranges::find(experts, layer_idx, &RankExperts::layer_idx);
    if (layer == experts.end()) continue;
    const RankMoves moves = moves_of(all, ranks.rank(), ranks.world_size());
    const int64_t most = staging_bytes / (2 * moves.most) / kAlignment * kAlignment - kAlignment;
    check_internal(most > 0, "the workspace of a step holds a part of each expert that moves");
    for (const ExpertLinear* const product : {layer->gate_up, layer->down}) {
      const auto pieces = product->pieces(0);
      for (size_t piece = 0; piece < pieces.size(); ++piece) {
        const int64_t num_bytes = std::ssize(pieces[piece]);
        for (int64_t begin = 0; begin < num_bytes; begin += most)
          exchange(moves, *product, piece, begin, std::min(most, num_bytes - begin), ranks, queue,
                   arena);
      }
    }
  }
}

}  // namespace llmserve
