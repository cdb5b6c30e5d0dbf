#include "kernels/cpu/cpu_attention.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/attention_ranks.h"

namespace llmserve {
namespace {

constexpr int64_t kMaxQueryRows = CpuAttention::kMaxQueryRows;
// Reading a tile costs about as much as this many query rows on it.
constexpr int64_t kReadCostRows = 4;
// An item that threads share is split into its spans if each thread gets at least so many, or else
// into its heads first: one span more or less is then a quarter of a share at most.
constexpr int64_t kMinSpans = 4;
// Of the partial results of spans and of shared prefixes in one step: 512 items of 8 heads of 128
// elements take 2 MiB.
constexpr int64_t kPartialBytes = 4 << 20;
// A prefix that sequences share is worth items of its own from so many tiles on: what it saves is
// that few rows do not fill a tile of rows, and reading; what it costs is to keep and take up the
// rows' state, as much as half a tile. Two threads of a Zen 5, 16 sequences: 1.2 to 2.5 times as
// fast with 2 rows a KV head, from 2 tiles on; with 8 rows 0.96 (2 tiles) to 1.05 times (32).
int64_t min_shared_tiles(int64_t group) { return std::max<int64_t>(2, group); }

// Whether tiles are prefetched into the L1, beside the one in use and what there is besides, and
// not into the L2. With an L1 of 48 KiB (Zen 5) one of 32 takes 0.93 to 0.98 of the time so. With
// 32 KiB (Zen 4), and few lines on their way to it at once, one of 32 takes 1.2 to 1.3 times, one
// of 16 up to 1.17; one of 8, of fp8, 0.93 where codes are multiplied and 0.75 to 0.85 where they
// are widened.
bool fits_l1(int64_t tile_bytes) {
  static const int64_t l1_bytes = l1_data_bytes();
  return tile_bytes * 3 <= (l1_bytes > 32 * 1024 ? 2 : 1) * l1_bytes;
}

// Bytes that are prefetched into the L2 before they are used, up to a tile of all heads of an item:
// with more than the next head's under way, memory has work while a softmax asks for nothing. Two
// threads of a Zen 4 whose memory gave 35 GB/s, times as fast as with the next head's alone:
//   tiles of                             32 KiB   64 KiB   128 KiB ahead
//   16 KiB (heads of 64 in bf16)           1.04     1.04      1.03
//   16 KiB (heads of 128 in fp8)           1.01     1.07      1.05
//   32 KiB (heads of 128 in bf16)          1.00     1.01      0.98
constexpr int64_t kAheadBytes = 64 << 10;

int64_t heads_ahead(int64_t tile_bytes) {
  return fits_l1(tile_bytes) ? 1 : std::max<int64_t>(1, kAheadBytes / tile_bytes);
}

// Of what a thread attends to after what sequences share, prefetched while it walks that: what its
// L2 has no room for waits in the last cache, which is nearer than memory.
constexpr int64_t kLaterBytes = 4 << 20;

static_assert(kKvTile == 64 && kKvSpan == 512, "attention.inc is written for these");

cpu::CacheStorage storage_of(DType dtype) {
  if (dtype == DType::kF32) return cpu::CacheStorage::kF32;
  return dtype == DType::kBF16 ? cpu::CacheStorage::kBf16 : cpu::CacheStorage::kFp8;
}

// Tokens of an item at most.
int64_t item_tokens(int64_t group) { return std::max<int64_t>(1, kMaxQueryRows / group); }

// KV heads of an item of so many tokens: a decode step's has all, whose cache is read in order.
int64_t item_heads(int64_t num_tokens, int64_t group, int64_t kv_heads) {
  return std::clamp<int64_t>(kMaxQueryRows / (num_tokens * group), 1, kv_heads);
}

// The positions [first, second) that the item's tokens see.
std::pair<int64_t, int64_t> seen_by(const cpu::AttentionItem& item, int64_t window) {
  const int64_t first = window > 0 ? std::max<int64_t>(0, item.first_position - window + 1) : 0;
  return {std::max(first, item.kv_begin),
          std::min(item.first_position + item.num_tokens, item.kv_end)};
}

// That the item walks, of all its heads.
int64_t tiles_of(const cpu::AttentionItem& item, int64_t window) {
  const auto [begin, end] = seen_by(item, window);
  return ((end + kKvTile - 1) / kKvTile - begin / kKvTile) * item.num_heads;
}

int64_t cost_of(const cpu::AttentionItem& item, int64_t window, int64_t group) {
  return tiles_of(item, window) * (item.num_tokens * group + kReadCostRows);
}

}  // namespace

// Whole tiles that decode steps of sequences b and b + 1 have in common: 0 if these are not such.
// Each has a position of its own behind them.
int64_t CpuAttention::tiles_in_common(const PagedAttentionArgs& args, size_t b) {
  if (b + 1 >= args.kv_lens.size()) return 0;
  const std::span<const int32_t> starts = args.query_starts.subspan(b, 3);
  if (starts[1] - starts[0] != 1 || starts[2] - starts[1] != 1) return 0;
  const int64_t block_size = args.cache.keys.shape[2];
  const int64_t most = std::min(args.kv_lens[b], args.kv_lens[b + 1]) - 1;
  const int32_t* table = args.block_tables.data() + static_cast<int64_t>(b) * args.max_blocks;
  const auto [end, other_end] =
      std::mismatch(table, table + most / block_size, table + args.max_blocks);
  return (end - table) * block_size / kKvTile;
}

CpuAttention::SharedPrefix CpuAttention::shared_prefix(const PagedAttentionArgs& args, size_t b,
                                                       int64_t group) const {
  // Threads take a KV head each, while the others wait.
  const int64_t kv_heads = args.cache.keys.shape[1];
  const int64_t threads = pool_.num_threads();
  const auto is_less_work = [&](int64_t count) {
    const int64_t together = (kv_heads + threads - 1) / threads * (count * group + kReadCostRows);
    return together < count * kv_heads * (group + kReadCostRows) / threads;
  };
  SharedPrefix shared;
  if (args.window > 0 || !is_less_work(kMaxQueryRows / group)) return shared;
  int64_t tiles = tiles_in_common(args, b);
  while (tiles >= min_shared_tiles(group) && (shared.count + 1) * group <= kMaxQueryRows) {
    // Neither at the price of half of what it shares with the next ones, nor of what those so far
    // do.
    const int64_t next = tiles_in_common(args, b + static_cast<size_t>(shared.count));
    if (next >= 2 * tiles) break;
    shared.end = tiles * kKvTile;
    ++shared.count;
    if (2 * next < tiles) break;
    tiles = std::min(tiles, next);
  }
  return is_less_work(shared.count) ? shared : SharedPrefix{};
}

cpu::AttentionState CpuAttention::list_prefix(const PagedAttentionArgs& args, size_t b,
                                              int64_t group, const SharedPrefix& shared) {
  const int64_t kv_heads = args.cache.keys.shape[1];
  const int64_t rows = shared.count * group;
  const int64_t size = kernels_.attention_state_floats(rows, args.cache.values.shape[3]);
  const int64_t room = partials_.num_bytes() / static_cast<int64_t>(sizeof(float));
  if (shared.count == 1 || states_end_ + kv_heads * size > room) return {};
  const cpu::AttentionState state{.at = reinterpret_cast<float*>(partials_.data()) + states_end_,
                                  .head_stride = size,
                                  .rows = rows,
                                  .first_row = 0};
  states_end_ += kv_heads * size;
  for (int64_t head = 0; head < kv_heads; ++head) {
    cpu::AttentionItem& item = prefix_items_.emplace_back();
    item = {.block_table = args.block_tables.data() + static_cast<int64_t>(b) * args.max_blocks,
            .kv_head = head,
            .num_heads = 1,
            .first_token = args.query_starts[b],
            .num_tokens = shared.count,
            .first_position = shared.end,
            .kv_begin = 0,
            .kv_end = shared.end,
            .partial = nullptr,
            .kept = state,
            .begun = {},
            .later = nullptr};
    item.kept.at += head * size;
  }
  return state;
}

void CpuAttention::list_items(const PagedAttentionArgs& args, int64_t group) {
  items_.clear();
  prefix_items_.clear();
  states_end_ = 0;
  const int64_t kv_heads = args.cache.keys.shape[1];
  SharedPrefix shared;
  cpu::AttentionState begun = {};
  size_t prefix_until = 0;  // the first sequence behind those that share one
  for (size_t b = 0; b < args.kv_lens.size(); ++b) {
    if (b >= prefix_until) {
      shared = is_shared(b) ? SharedPrefix{} : shared_prefix(args, b, group);
      prefix_until = b + static_cast<size_t>(shared.count);
      begun = list_prefix(args, b, group, shared);
    } else if (begun.at != nullptr) {
      begun.first_row += group;
    }
    const int64_t first = args.query_starts[b];
    const int64_t last = args.query_starts[b + 1];
    const int64_t max_tokens = std::min(item_tokens(group), last - first);
    if (max_tokens == 0 || is_shared(b)) continue;
    const int64_t max_heads =
        args.cache.has_values_in_keys() ? 1 : item_heads(max_tokens, group, kv_heads);
    for (int64_t head = 0; head < kv_heads; head += max_heads) {
      for (int64_t t = first; t < last; t += max_tokens) {
        items_.push_back(
            {.block_table = args.block_tables.data() + static_cast<int64_t>(b) * args.max_blocks,
             .kv_head = head,
             .num_heads = std::min(max_heads, kv_heads - head),
             .first_token = t,
             .num_tokens = std::min(max_tokens, last - t),
             .first_position = args.kv_lens[b] - (last - t),
             .kv_begin = begun.at != nullptr ? shared.end : 0,
             .kv_end = args.kv_lens[b],
             .partial = nullptr,
             .kept = {},
             .begun = begun,
             .later = nullptr});
        items_.back().begun.at =
            begun.at == nullptr ? nullptr : begun.at + head * begun.head_stride;
      }
    }
  }
}

void CpuAttention::split_items(int64_t window, int64_t group, int64_t value_dim) {
  split_items_.clear();
  if (pool_.num_threads() == 1) return;
  const auto num_spans = [&](const cpu::AttentionItem& item) {
    const auto [begin, end] = seen_by(item, window);
    return (end + kKvSpan - 1) / kKvSpan - begin / kKvSpan;
  };
  // Few spans would not share the work evenly.
  replace_shared(window, group, [&](const cpu::AttentionItem& item) {
    if (item.num_heads == 1 || num_spans(item) >= kMinSpans * pool_.num_threads()) return false;
    for (int64_t head = 0; head < item.num_heads; ++head) {
      cpu::AttentionItem& part = items_.emplace_back(item);
      part.kv_head += head;
      part.num_heads = 1;
      if (item.begun.at != nullptr) part.begun.at += head * item.begun.head_stride;
    }
    return true;
  });
  auto* next = reinterpret_cast<float*>(partials_.data()) + states_end_;
  auto* const end = reinterpret_cast<float*>(partials_.data() + partials_.num_bytes());
  replace_shared(window, group, [&](const cpu::AttentionItem& item) {
    const int64_t spans = num_spans(item);
    const int64_t floats =
        kernels_.attention_partial_floats(item.num_heads * item.num_tokens * group, value_dim);
    if (spans < 2 || spans * floats > end - next) return false;
    split_items_.push_back({.item = item, .num_spans = spans});
    split_items_.back().item.partial = next;
    const auto [seen_begin, seen_end] = seen_by(item, window);
    for (int64_t span = 0; span < spans; ++span, next += floats) {
      cpu::AttentionItem& part = items_.emplace_back(item);
      const int64_t begin = (seen_begin / kKvSpan + span) * kKvSpan;
      part.kv_begin = std::max(item.kv_begin, begin);
      part.kv_end = std::min(seen_end, begin + kKvSpan);
      part.partial = next;
      if (span > 0) part.begun = {};
    }
    return true;
  });
}

template <class Split>
void CpuAttention::replace_shared(int64_t window, int64_t group, Split split) {
  whole_items_.swap(items_);
  items_.clear();
  int64_t total = 0;
  for (const cpu::AttentionItem& item : whole_items_) total += cost_of(item, window, group);
  const auto shares_at = [&](int64_t cost) { return cost * pool_.num_threads() / total; };
  int64_t begin = 0;
  for (const cpu::AttentionItem& item : whole_items_) {
    const int64_t end = begin + cost_of(item, window, group);
    const bool is_shared = shares_at(begin) != shares_at(end - 1);
    if (!is_shared || !split(item)) items_.push_back(item);
    begin = end;
  }
}

void CpuAttention::deal_items(const std::vector<cpu::AttentionItem>& items, int64_t window,
                              int64_t group, std::vector<int64_t>& starts) {
  item_costs_.clear();
  int64_t total = 0;
  for (const cpu::AttentionItem& item : items)
    item_costs_.push_back(total += cost_of(item, window, group));
  starts.assign(1, 0);
  for (int64_t i = 1; i <= pool_.num_threads(); ++i) {
    const auto cut =
        std::lower_bound(item_costs_.begin(), item_costs_.end(), total * i / pool_.num_threads());
    const int64_t end =
        std::min<int64_t>(cut - item_costs_.begin() + 1, static_cast<int64_t>(items.size()));
    starts.push_back(std::max(starts.back(), end));
  }
}

int64_t CpuAttention::partial_bytes() { return kPartialBytes; }

void CpuAttention::reserve() {
  if (partials_.num_bytes() < kPartialBytes) partials_ = Buffer(kPartialBytes);
}

int64_t CpuAttention::scratch_bytes(int64_t max_tokens, const StepShape& shape) const {
  int64_t rows =
      std::min(std::max(kMaxQueryRows, shape.group), max_tokens * shape.num_kv_heads * shape.group);
  if (shape.has_values_in_keys)
    rows = (rows + cpu::kPanelWidth - 1) / cpu::kPanelWidth * cpu::kPanelWidth;
  return kernels_.attention_scratch_floats(rows, shape.key_dim, shape.value_dim) *
         static_cast<int64_t>(sizeof(float));
}

void CpuAttention::prefetch_own_later(int64_t window, int64_t tile_bytes) {
  laters_.resize(static_cast<size_t>(pool_.num_threads()));
  for (size_t thread = 0; thread < laters_.size(); ++thread) {
    cpu::AttentionLater& later = laters_[thread];
    later = {.item = items_.data() + item_starts_[thread],
             .end = items_.data() + item_starts_[thread + 1],
             .head = 0,
             .position = 0,
             .tiles_before = 0};
    int64_t own_tiles = 0;
    for (const cpu::AttentionItem* item = later.item; item < later.end; ++item)
      own_tiles += tiles_of(*item, window);
    own_tiles = std::min(own_tiles, kLaterBytes / tile_bytes);
    for (int64_t i = prefix_starts_[thread]; i < prefix_starts_[thread + 1]; ++i) {
      cpu::AttentionItem& prefix = prefix_items_[static_cast<size_t>(i)];
      prefix.later = &later;
      later.tiles_before += tiles_of(prefix, window);
    }
    later.tiles_before = std::max<int64_t>(0, later.tiles_before - (own_tiles + 1) / 2);
  }
}

void CpuAttention::run_items(const cpu::AttentionCall& call, DType dtype,
                             const std::vector<cpu::AttentionItem>& items,
                             const std::vector<int64_t>& starts) {
  const auto attention = kernels_.attention[static_cast<size_t>(storage_of(dtype))];
  pool_.parallel_for(pool_.num_threads(), 1, [&](int64_t begin, int64_t end, int thread_idx) {
    for (int64_t part = begin; part < end; ++part) {
      const cpu::AttentionItem* item = items.data() + starts[static_cast<size_t>(part)];
      const cpu::AttentionItem* last = items.data() + starts[static_cast<size_t>(part) + 1];
      for (; item < last; ++item)
        attention(&call, item, item + 1 < last ? item + 1 : nullptr,
                  workers_.scratch<float>(thread_idx));
    }
  });
}

// Outputs go to `rounded`, a token's heads side by side, if that has rows.
void CpuAttention::run(const PagedAttentionArgs& args, const RoundedRows& rounded) {
  const Tensor& keys = args.cache.keys;
  const Tensor& values = args.cache.values;
  const bool has_panels = args.cache.key_layout == KeyLayout::kPanels;
  const bool has_values_in_keys = args.cache.has_values_in_keys();
  if (has_panels && values.shape[3] % cpu::kPanelWidth != 0)
    throw InvalidArgument(concat("paged_attention.cache: expected values of a multiple of ",
                                 cpu::kPanelWidth, " elements beside keys in panels, got ",
                                 values.shape[3]));
  const int64_t group = args.q.shape[1] / keys.shape[1];
  share_spans(args);
  list_items(args, group);
  if (items_.empty() && shared_.empty()) return;
  reserve();
  const int64_t most_rows = shared_.empty() ? group : args.ranks->rows().count;
  workers_.reserve_scratch(
      scratch_bytes(args.q.shape[0], {.num_kv_heads = keys.shape[1],
                                      .group = most_rows,
                                      .key_dim = keys.shape[3],
                                      .value_dim = values.shape[3],
                                      .has_values_in_keys = has_values_in_keys}));
  split_items(args.window, group, values.shape[3]);
  const int64_t value_bytes = has_values_in_keys ? 0 : cache_row_bytes(keys.dtype, values.shape[3]);
  const int64_t tile_bytes = kKvTile * (cache_row_bytes(keys.dtype, keys.shape[3]) + value_bytes);
  const bool is_rounded = rounded.data != nullptr;
  const cpu::AttentionCall call{
      .q = args.q.as<float>(),
      .q_token_stride = args.q.strides[0],
      .q_head_stride = args.q.strides[1],
      .keys = keys.data,
      .values = values.data,
      .has_key_panels = has_panels,
      .has_values_in_keys = has_values_in_keys,
      .fits_l1 = fits_l1(tile_bytes),
      .heads_ahead = heads_ahead(tile_bytes),
      .kv_heads = keys.shape[1],
      .block_size = keys.shape[2],
      .head_dim = keys.shape[3],
      .value_dim = values.shape[3],
      .group = group,
      .scale = args.scale,
      .soft_cap = args.soft_cap,
      .sinks = args.sinks ? args.sinks.as<float>() : nullptr,
      .window = args.window,
      .out = args.out.data,
      .is_out_rounded = is_rounded,
      .out_token_stride = is_rounded ? rounded.stride : args.out.strides[0],
      .out_head_stride = args.out.strides[1]};
  if (!shared_.empty()) walk_spans(args, call);
  deal_items(items_, args.window, group, item_starts_);
  if (!prefix_items_.empty()) {
    deal_items(prefix_items_, args.window, group, prefix_starts_);
    prefetch_own_later(args.window, tile_bytes);
    run_items(call, keys.dtype, prefix_items_, prefix_starts_);
  }
  run_items(call, keys.dtype, items_, item_starts_);
  pool_.parallel_for(static_cast<int64_t>(split_items_.size()), 1,
                     [&](int64_t begin, int64_t end, int thread_idx) {
                       for (int64_t i = begin; i < end; ++i) {
                         const SplitItem& split = split_items_[static_cast<size_t>(i)];
                         kernels_.merge_attention(&call, &split.item, split.num_spans,
                                                  workers_.scratch<float>(thread_idx));
                       }
                     });
  if (!shared_.empty()) merge_spans(args, call);
}

}  // namespace llmserve
