// Sampling on the device: what the rows ask for goes there in one copy, what they get comes back in
// one; in between the host waits for nothing.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cuda/cuda_backend.h"

namespace llmserve::cuda {
namespace {

// Bytes that go to or come from the device together: arrays laid end to end, each aligned.
class Layout {
 public:
  template <class T>
  int64_t add(int64_t count) {
    const int64_t begin = ceil_div(num_bytes_, kAlignment) * kAlignment;
    num_bytes_ = begin + count * static_cast<int64_t>(sizeof(T));
    return begin;
  }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  static constexpr int64_t kAlignment = 16;
  int64_t num_bytes_ = 0;
};

// What a step's kernels read, as bytes.
class Asked {
 public:
  template <class T>
  DrawList add(std::span<const T> values) {
    const DrawList list{layout_.add<T>(std::ssize(values)), std::ssize(values)};
    bytes_.resize(static_cast<size_t>(layout_.num_bytes()));
    if (!values.empty())
      std::memcpy(bytes_.data() + list.begin, values.data(), values.size_bytes());
    return list;
  }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  Layout layout_;
  std::vector<std::byte> bytes_;
};

bool is_edited(const SampleRow& row) {
  return row.draw_logits || !row.biases.empty() || !row.allowed.empty() ||
         !row.banned_token_ids.empty() || !row.counts.empty();
}

// The row as the kernel takes it, its lists among what is asked.
DrawRow draw_row(const SampleRow& row, const float* raw, int64_t vocabulary, Asked& asked) {
  DrawRow to{.raw = raw,
             .temperature = row.temperature,
             .top_p = row.top_p,
             .min_p = row.min_p,
             .top_k = row.top_k,
             .seed = row.seed,
             .position = row.position,
             .forced_token_id = row.forced_token_id,
             .is_edited = is_edited(row),
             .repetition_penalty = row.repetition_penalty,
             .frequency_penalty = row.frequency_penalty,
             .presence_penalty = row.presence_penalty};
  if (!to.is_edited || row.forced_token_id >= 0) return to;
  if (row.draw_logits)
    to.logits = asked.add(std::span(row.draw_logits.as<float>(), static_cast<size_t>(vocabulary)));
  std::vector<DrawBias> biases;
  for (const TokenBias& bias : row.biases) biases.push_back({bias.token_id, bias.bias});
  std::vector<DrawCount> counts;
  for (const TokenCount& count : row.counts)
    counts.push_back({count.token_id, count.num_generated});
  to.biases = asked.add(std::span<const DrawBias>(biases));
  to.allowed = asked.add(row.allowed);
  to.banned = asked.add(row.banned_token_ids);
  to.counts = asked.add(std::span<const DrawCount>(counts));
  return to;
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
void read_report(const SampleRow& row, const Report& report, const Ranked* ranked,
                 std::span<const TopEntry> top, SampledRow& out) {
  const auto logprob = [&](float logit) { return logit - report.max - report.log_sum; };
  out.logprob = logprob(ranked[0].logit);
  out.rank = ranked[0].rank;
  for (const TopEntry& entry : top) out.top.push_back({entry.token_id, entry.logit, 0});
  for (size_t i = 0; i < row.reported_token_ids.size(); ++i)
    out.reported.push_back({row.reported_token_ids[i], ranked[i + 1].logit, ranked[i + 1].rank});
  for (std::vector<TopToken>* tokens : {&out.top, &out.reported})
    sort_best_first(*tokens, [](const TopToken& token) { return token.logprob; });
  for (size_t i = 0; i < out.top.size(); ++i) {
    const bool is_tied = i > 0 && out.top[i - 1].logprob == out.top[i].logprob;
    out.top[i].rank = is_tied ? out.top[i - 1].rank : static_cast<int32_t>(i) + 1;
  }
  for (std::vector<TopToken>* tokens : {&out.top, &out.reported})
    for (TopToken& token : *tokens) token.logprob = logprob(token.logprob);
}

// A step's rows, reports and queries, and all that they refer to.
struct Step {
  Asked asked;
  DrawList rows;     // DrawRow
  DrawList reports;  // ReportRow, of the rows with num_top >= 0
  DrawList queries;  // RankQuery: of each such row its token, then its reported ones
  int64_t num_top = 0;
};

int32_t top_of(const SampleRow& row, int64_t vocabulary) {
  return static_cast<int32_t>(std::min<int64_t>(row.num_top, vocabulary));
}

Step ask(const SampleArgs& args) {
  const int64_t vocabulary = args.logits.shape[1];
  Step step;
  std::vector<DrawRow> rows;
  std::vector<ReportRow> reports;
  std::vector<RankQuery> queries;
  for (size_t i = 0; i < args.rows.size(); ++i) {
    const SampleRow& row = args.rows[i];
    const auto idx = static_cast<int32_t>(i);
    const float* raw = args.logits.as<float>() + idx * args.logits.strides[0];
    rows.push_back(draw_row(row, raw, vocabulary, step.asked));
    if (row.num_top < 0) continue;
    const int32_t top = top_of(row, vocabulary);
    reports.push_back({raw, step.num_top, top});
    step.num_top += top;
    queries.push_back({raw, -1, idx});
    for (const int32_t id : row.reported_token_ids) queries.push_back({raw, id, idx});
  }
  step.rows = step.asked.add(std::span<const DrawRow>(rows));
  step.reports = step.asked.add(std::span<const ReportRow>(reports));
  step.queries = step.asked.add(std::span<const RankQuery>(queries));
  return step;
}

// Where the kernels write what the host reads.
struct Answers {
  explicit Answers(const Step& step)
      : drawn(layout.add<Drawn>(step.rows.count)),
        reports(layout.add<Report>(step.reports.count)),
        ranked(layout.add<Ranked>(step.queries.count)),
        top(layout.add<TopEntry>(step.num_top)),
        num_bytes(ceil_div(layout.num_bytes(), 16) * 16) {}

  Layout layout;
  int64_t drawn;
  int64_t reports;
  int64_t ranked;
  int64_t top;
  int64_t num_bytes;
};

void read_answers(const SampleArgs& args, const Answers& answers, const std::byte* bytes) {
  const auto* drawn = reinterpret_cast<const Drawn*>(bytes + answers.drawn);
  const auto* report = reinterpret_cast<const Report*>(bytes + answers.reports);
  const auto* ranked = reinterpret_cast<const Ranked*>(bytes + answers.ranked);
  const auto* top = reinterpret_cast<const TopEntry*>(bytes + answers.top);
  for (size_t i = 0; i < args.rows.size(); ++i) {
    const SampleRow& row = args.rows[i];
    SampledRow& out = args.out[i];
    out = SampledRow{};
    out.token_id = drawn[i].token_id;
    out.is_valid = drawn[i].is_valid != 0;
    out.is_raw_valid = drawn[i].is_raw_valid != 0;
    if (row.num_top < 0) continue;
    const auto count = static_cast<size_t>(top_of(row, args.logits.shape[1]));
    if (out.is_valid) read_report(row, *report, ranked, {top, count}, out);
    ++report;
    ranked += 1 + row.reported_token_ids.size();
    top += count;
  }
}

}  // namespace

void CudaBackend::sample(const SampleArgs& args) {
  validate(args);
  memory_.make_current();
  const int64_t vocabulary = args.logits.shape[1];
  const Step step = ask(args);
  const Answers answers(step);
  const int64_t z_bytes = step.rows.count * vocabulary * static_cast<int64_t>(sizeof(float));
  std::byte* memory = scratch(answers.num_bytes + z_bytes);
  auto* drawn = reinterpret_cast<Drawn*>(memory + answers.drawn);

  const std::byte* data = sampling_(step.asked.bytes());
  draw(reinterpret_cast<const DrawRow*>(data + step.rows.begin), step.rows.count, data, vocabulary,
       reinterpret_cast<float*>(memory + answers.num_bytes), drawn, stream());
  report(reinterpret_cast<const ReportRow*>(data + step.reports.begin), step.reports.count,
         vocabulary, reinterpret_cast<Report*>(memory + answers.reports),
         reinterpret_cast<TopEntry*>(memory + answers.top), stream());
  rank(reinterpret_cast<const RankQuery*>(data + step.queries.begin), step.queries.count, drawn,
       vocabulary, reinterpret_cast<Ranked*>(memory + answers.ranked), stream());

  std::vector<std::byte> bytes(static_cast<size_t>(answers.num_bytes));
  memory_.copy_to_host(bytes.data(), memory, answers.num_bytes);
  read_answers(args, answers, bytes.data());
}

}  // namespace llmserve::cuda
