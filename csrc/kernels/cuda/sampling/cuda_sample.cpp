#include "kernels/cuda/sampling/cuda_sample.h"

#include <algorithm>
#include <cstring>

namespace llmserve::cuda {
namespace {

bool is_edited(const SampleRow& row) {
  return row.draw_logits || !row.biases.empty() || !row.allowed.empty() ||
         !row.banned_token_ids.empty() || !row.counts.empty();
}

// Best first, ties to the lowest id.
template <class Logit>
void sort_best_first(std::vector<TopToken>& tokens, const Logit& logit_of) {
  std::ranges::sort(tokens, [&](const TopToken& a, const TopToken& b) {
    const float x = logit_of(a);
    const float y = logit_of(b);
    return x != y ? x > y : a.token_id < b.token_id;
  });
}

// What the kernels wrote of one row, less the token. Until here a token's logprob is its logit.
void read_report(std::span<const int32_t> reported_token_ids, const Report& report,
                 const Ranked* ranked, std::span<const TopEntry> top, SampledRow& out) {
  const auto logprob = [&](float logit) { return logit - report.max - report.log_sum; };
  out.logprob = logprob(ranked[0].logit);
  out.rank = ranked[0].rank;
  for (const TopEntry& entry : top) out.top.push_back({entry.token_id, entry.logit, 0});
  for (size_t i = 0; i < reported_token_ids.size(); ++i)
    out.reported.push_back({reported_token_ids[i], ranked[i + 1].logit, ranked[i + 1].rank});
  for (std::vector<TopToken>* tokens : {&out.top, &out.reported})
    sort_best_first(*tokens, [](const TopToken& token) { return token.logprob; });
  for (size_t i = 0; i < out.top.size(); ++i) {
    const bool is_tied = i > 0 && out.top[i - 1].logprob == out.top[i].logprob;
    out.top[i].rank = is_tied ? out.top[i - 1].rank : static_cast<int32_t>(i) + 1;
  }
  for (std::vector<TopToken>* tokens : {&out.top, &out.reported})
    for (TopToken& token : *tokens) token.logprob = logprob(token.logprob);
}

}  // namespace

template <class T>
DrawList SampleCall::add(std::span<const T> values) {
  const DrawList list{asked_layout_.add<T>(std::ssize(values)), std::ssize(values)};
  if (!values.empty()) parts_.push_back({list.begin, values.data(), values.size_bytes()});
  return list;
}

DrawList SampleCall::add(std::span<const TokenCount> counts) {
  const DrawList list{asked_layout_.add<DrawCount>(std::ssize(counts)), std::ssize(counts)};
  if (!counts.empty()) counts_.emplace_back(list.begin, counts);
  return list;
}

void SampleCall::write_asked(std::byte* to, const std::byte* asked) {
  // A list is told by how far it is from what was asked, in which others are.
  for (const auto& [row, counts] : kept_)
    draw_rows_[row].counts.begin =
        reinterpret_cast<intptr_t>(counts) - reinterpret_cast<intptr_t>(asked);
  for (const Part& part : parts_) std::memcpy(to + part.begin, part.from, part.num_bytes);
  for (const auto& [begin, counts] : counts_) {
    auto* count = reinterpret_cast<DrawCount*>(to + begin);
    for (const TokenCount& each : counts) *count++ = {each.token_id, each.num_generated};
  }
  parts_.clear();
  counts_.clear();
  kept_.clear();
}

// The row as the kernel takes it, its lists among what is asked.
DrawRow SampleCall::draw_row(const SampleRow& row, const float* raw, const int32_t* late_token,
                             const KeptCounts& kept, DeviceCounts* lists) {
  DrawRow to{.raw = raw,
             .draw = row.draw,
             .seed = row.seed,
             .position = row.position,
             .forced_token_id = row.forced_token_id,
             .is_edited = is_edited(row) || late_token != nullptr,
             .late_token = late_token};
  if (!to.is_edited || row.forced_token_id >= 0) return to;
  if (row.draw_logits)
    to.logits = add(std::span(row.draw_logits.as<float>(), static_cast<size_t>(vocabulary_)));
  static_assert(sizeof(TokenBias) == sizeof(DrawBias) &&
                offsetof(TokenBias, bias) == offsetof(DrawBias, bias));
  to.biases = add(row.biases);
  to.allowed = add(row.allowed);
  to.banned = add(row.banned_token_ids);
  if (lists && kept.id != 0 && !row.counts.empty()) {
    kept_.emplace_back(draw_rows_.size(), lists->bring_up(row.counts, kept, count_updates_));
    to.counts.count = std::ssize(row.counts);
  } else {
    to.counts = add(row.counts);
  }
  return to;
}

SampleCall::SampleCall(const ConstTensor& logits, std::span<const SampleRow> rows,
                       std::span<const int32_t* const> late_tokens,
                       std::span<const KeptCounts> kept, DeviceCounts* lists)
    : vocabulary_(logits.shape[1]), wanted_(rows.size()) {
  draw_rows_.reserve(rows.size());
  int64_t num_top = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const SampleRow& row = rows[i];
    const auto idx = static_cast<int32_t>(i);
    const float* raw = logits.as<float>() + idx * logits.strides[0];
    draw_rows_.push_back(draw_row(row, raw, late_tokens.empty() ? nullptr : late_tokens[i],
                                  kept.empty() ? KeptCounts{} : kept[i], lists));
    if (row.num_top < 0) continue;
    const auto top = static_cast<int32_t>(std::min<int64_t>(row.num_top, vocabulary_));
    wanted_[i] = {top, {row.reported_token_ids.begin(), row.reported_token_ids.end()}};
    report_rows_.push_back({.raw = raw, .top_begin = num_top, .num_top = top, .row = idx});
    num_top += top;
    rank_queries_.push_back({.raw = raw, .token_id = -1, .row = idx});
    for (const int32_t id : row.reported_token_ids)
      rank_queries_.push_back({.raw = raw, .token_id = id, .row = idx});
  }
  rows_ = add(std::span<const DrawRow>(draw_rows_));
  updates_ = add(std::span<const CountUpdate>(count_updates_));
  reports_ = add(std::span<const ReportRow>(report_rows_));
  queries_ = add(std::span<const RankQuery>(rank_queries_));
  reports_begin_ = answers_.add<Report>(reports_.count);
  ranked_begin_ = answers_.add<Ranked>(queries_.count);
  top_begin_ = answers_.add<TopEntry>(num_top);
}

void SampleCall::launch(std::byte* asked, std::byte* answers, std::byte* weights, DrawnRow* drawn,
                        cudaStream_t stream) const {
  auto* rows = reinterpret_cast<DrawRow*>(asked + rows_.begin);
  update_counts(reinterpret_cast<const CountUpdate*>(asked + updates_.begin), updates_.count,
                stream);
  draw(rows, rows_.count, asked, vocabulary_, reinterpret_cast<float*>(weights), drawn, stream);
  report(reinterpret_cast<ReportRow*>(asked + reports_.begin), reports_.count, rows, drawn,
         vocabulary_, reinterpret_cast<Report*>(answers + reports_begin_),
         reinterpret_cast<TopEntry*>(answers + top_begin_), stream);
  rank(reinterpret_cast<RankQuery*>(asked + queries_.begin), queries_.count, drawn, vocabulary_,
       reinterpret_cast<Ranked*>(answers + ranked_begin_), stream);
}

void SampleCall::read(const DrawnRow* drawn, const std::byte* answers,
                      std::span<SampledRow> out) const {
  const auto* report = reinterpret_cast<const Report*>(answers + reports_begin_);
  const auto* ranked = reinterpret_cast<const Ranked*>(answers + ranked_begin_);
  const auto* top = reinterpret_cast<const TopEntry*>(answers + top_begin_);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = SampledRow{};
    out[i].token_id = drawn[i].token_id;
    out[i].is_valid = drawn[i].is_valid != 0;
    out[i].is_raw_valid = drawn[i].is_raw_valid != 0;
    const Wanted& wanted = wanted_[i];
    if (wanted.num_top < 0) continue;
    const auto count = static_cast<size_t>(wanted.num_top);
    if (out[i].is_valid) read_report(wanted.token_ids, *report, ranked, {top, count}, out[i]);
    ++report;
    ranked += 1 + wanted.token_ids.size();
    top += count;
  }
}

}  // namespace llmserve::cuda
