// Attention to long contexts whose spans ranks share: threads of one process, which read each
// other's queries and results where they lie.
//
// A rank by itself would walk all of the context for its own heads, and so would every other: with
// few heads to a KV head, reading is most of it. Here each rank walks some spans for all heads. The
// result of a span is the same whoever walks it and beside whatever rows, and results merge in the
// order of positions, as those that threads of one rank have walked do.

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "kernels/attention_ranks.h"
#include "kernels/cpu/cpu_attention.h"

namespace llmserve {
namespace {

int64_t padded(int64_t count) {
  return (count + cpu::kPanelWidth - 1) / cpu::kPanelWidth * cpu::kPanelWidth;
}

int64_t num_spans(int64_t length) { return (length + kKvSpan - 1) / kKvSpan; }

// A result as kernels keep it: outputs [rows, Dv padded], maxima [rows padded], sums [rows padded].
template <class Float>
struct SpanResult {
  SpanResult(Float* at, int64_t rows, int64_t width)
      : outputs(at), maxima(at + rows * width), sums(maxima + padded(rows)) {}
  Float* outputs;
  Float* maxima;
  Float* sums;
};

}  // namespace

void CpuAttention::share_spans(const PagedAttentionArgs& args) {
  shared_.clear();
  are_shared_.clear();
  num_shared_spans_ = 0;
  if (args.ranks == nullptr) return;
  choose_shared(args);
  if (!shared_.empty()) deal_spans(args);
  shown_ = {.q = args.q.as<float>(),
            .token_stride = args.q.strides[0],
            .head_stride = args.q.strides[1],
            .room = args.ranks->room().as<float>()};
  seen_.clear();
  for (const void* shown : args.ranks->meet(&shown_))
    seen_.push_back(*static_cast<const Shown*>(shown));
}

// By numbers that all ranks have.
void CpuAttention::choose_shared(const PagedAttentionArgs& args) {
  if (args.window > 0) return;
  const RankRows& rows = args.ranks->rows();
  int64_t room = args.ranks->room().num_elements();
  int64_t common_before = 0;  // tiles that the sequence has in common with the one before
  are_shared_.assign(args.kv_lens.size(), 0);
  for (size_t b = 0; b < args.kv_lens.size(); ++b) {
    const int64_t common = tiles_in_common(args, b);
    const int64_t most_common = std::max(common, std::exchange(common_before, common));
    const int64_t length = args.kv_lens[b];
    const int64_t first = args.query_starts[b];
    const int64_t num_tokens = args.query_starts[b + 1] - first;
    const int64_t most_rows = num_tokens * rows.most;
    if (num_tokens == 0 || most_rows > kMaxQueryRows) continue;
    if (num_spans(length) < std::ssize(rows.runs)) continue;
    // Where neighbours have most of it in common, each rank walks that once for all of them.
    if (2 * most_common * kKvTile > length) continue;
    // All results twice, as they are walked and to be merged, and the queries.
    const int64_t floats =
        2 * num_spans(length) *
            kernels_.attention_partial_floats(most_rows, args.cache.values.shape[3]) +
        most_rows * args.q.shape[2];
    if (floats > room) continue;
    room -= floats;
    are_shared_[b] = 1;
    shared_.push_back({.sequence = b,
                       .first_token = first,
                       .num_tokens = num_tokens,
                       .first_span = 0,
                       .num_spans = num_spans(length),
                       .is_walked_here = false});
  }
}

// Spans that follow one another, of about equal cost, to each rank.
void CpuAttention::deal_spans(const PagedAttentionArgs& args) {
  const RankRows& rows = args.ranks->rows();
  const int64_t num_ranks = std::ssize(rows.runs);
  const auto cost_of_span = [&](const SharedContext& context, int64_t span) {
    const int64_t end = std::min<int64_t>(args.kv_lens[context.sequence], (span + 1) * kKvSpan);
    return (end - span * kKvSpan + kKvTile - 1) / kKvTile * (context.num_tokens * rows.count);
  };
  int64_t total = 0;
  for (const SharedContext& context : shared_)
    for (int64_t span = 0; span < context.num_spans; ++span) total += cost_of_span(context, span);
  spans_.clear();
  room_used_.assign(rows.runs.size(), 0);
  int64_t before = 0;
  for (SharedContext& context : shared_) {
    context.first_span = spans_.size();
    const int64_t floats = kernels_.attention_partial_floats(context.num_tokens * rows.count,
                                                             args.cache.values.shape[3]);
    for (int64_t span = 0; span < context.num_spans; ++span) {
      const int64_t cost = cost_of_span(context, span);
      const int64_t rank = (2 * before + cost) * num_ranks / (2 * total);
      before += cost;
      int64_t& used = room_used_[static_cast<size_t>(rank)];
      spans_.push_back({.rank = rank, .offset = used});
      used += floats;
      context.is_walked_here = context.is_walked_here || rank == rows.rank;
    }
  }
}

void CpuAttention::bring_queries(const PagedAttentionArgs& args, float* to) const {
  const RankRows& rows = args.ranks->rows();
  const int64_t dim = args.q.shape[2];
  for (const SharedContext& context : shared_) {
    for (int64_t t = 0; context.is_walked_here && t < context.num_tokens; ++t) {
      for (size_t rank = 0; rank < seen_.size(); ++rank) {
        const Shown& theirs = seen_[rank];
        const RankRows::Run& run = rows.runs[rank];
        const float* from = theirs.q + (context.first_token + t) * theirs.token_stride;
        for (int64_t head = 0; head < run.count; ++head)
          std::memcpy(to + (t * rows.count + run.begin + head) * dim,
                      from + head * theirs.head_stride, static_cast<size_t>(dim) * sizeof(float));
      }
    }
    to += context.num_tokens * rows.count * dim;
  }
}

void CpuAttention::walk_spans(const PagedAttentionArgs& args, cpu::AttentionCall call) {
  const RankRows& rows = args.ranks->rows();
  const Tensor& room = args.ranks->room();
  int64_t num_floats = 0;  // of the queries, at the end of the room
  for (const SharedContext& context : shared_)
    num_floats += context.num_tokens * rows.count * call.head_dim;
  float* const queries = room.as<float>() + room.num_elements() - num_floats;
  bring_queries(args, queries);
  call.q = queries;
  call.q_token_stride = rows.count * call.head_dim;
  call.q_head_stride = call.head_dim;
  call.group = rows.count;
  span_items_.clear();
  int64_t token = 0;
  for (const SharedContext& context : shared_) {
    const int64_t length = args.kv_lens[context.sequence];
    for (int64_t i = 0; i < context.num_spans; ++i) {
      const SharedSpan& span = spans_[context.first_span + static_cast<size_t>(i)];
      if (span.rank != rows.rank) continue;
      span_items_.push_back(
          {.block_table =
               args.block_tables.data() + static_cast<int64_t>(context.sequence) * args.max_blocks,
           .kv_head = 0,
           .num_heads = 1,
           .first_token = token,
           .num_tokens = context.num_tokens,
           .first_position = length - context.num_tokens,
           .kv_begin = i * kKvSpan,
           .kv_end = std::min<int64_t>(length, (i + 1) * kKvSpan),
           .partial = room.as<float>() + span.offset,
           .kept = {},
           .begun = {},
           .later = nullptr});
    }
    token += context.num_tokens;
  }
  num_shared_spans_ = std::ssize(span_items_);
  deal_items(span_items_, 0, rows.count, span_starts_);
  run_items(call, args.cache.keys.dtype, span_items_, span_starts_);
}

void CpuAttention::merge_spans(const PagedAttentionArgs& args, const cpu::AttentionCall& call) {
  const RankRows& rows = args.ranks->rows();
  const RankRows::Run own = rows.runs[static_cast<size_t>(rows.rank)];
  const int64_t width = padded(call.value_dim);
  args.ranks->meet(&shown_);
  // Where a context's results of this rank's rows go, one after another, behind those walked here.
  const auto floats_of = [&](const SharedContext& context) {
    return kernels_.attention_partial_floats(context.num_tokens * own.count, call.value_dim);
  };
  float* next = args.ranks->room().as<float>() + room_used_[static_cast<size_t>(rows.rank)];
  span_items_.clear();
  for (const SharedContext& context : shared_) {
    const int64_t length = args.kv_lens[context.sequence];
    span_items_.push_back({.block_table = nullptr,  // nothing is read of the cache
                           .kv_head = 0,
                           .num_heads = 1,
                           .first_token = context.first_token,
                           .num_tokens = context.num_tokens,
                           .first_position = length - context.num_tokens,
                           .kv_begin = 0,
                           .kv_end = length,
                           .partial = next,
                           .kept = {},
                           .begun = {},
                           .later = nullptr});
    next += context.num_spans * floats_of(context);
  }
  const auto bring = [&](const SharedContext& context, float* to) {
    for (int64_t i = 0; i < context.num_spans; ++i, to += floats_of(context)) {
      const SharedSpan& span = spans_[context.first_span + static_cast<size_t>(i)];
      const SpanResult from(seen_[static_cast<size_t>(span.rank)].room + span.offset,
                            context.num_tokens * rows.count, width);
      const SpanResult kept(to, context.num_tokens * own.count, width);
      for (int64_t t = 0; t < context.num_tokens; ++t) {
        const int64_t row = t * rows.count + own.begin;
        std::copy_n(from.outputs + row * width, own.count * width,
                    kept.outputs + t * own.count * width);
        std::copy_n(from.maxima + row, own.count, kept.maxima + t * own.count);
        std::copy_n(from.sums + row, own.count, kept.sums + t * own.count);
      }
    }
  };
  pool_.parallel_for(std::ssize(shared_), 1, [&](int64_t begin, int64_t end, int thread_idx) {
    for (int64_t i = begin; i < end; ++i) {
      const SharedContext& context = shared_[static_cast<size_t>(i)];
      const cpu::AttentionItem& item = span_items_[static_cast<size_t>(i)];
      bring(context, item.partial);
      kernels_.merge_attention(&call, &item, context.num_spans,
                               workers_.scratch<float>(thread_idx));
    }
  });
}

}  // namespace llmserve
