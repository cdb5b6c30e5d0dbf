// The sample op: draws, edits, log-probabilities and ranks.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "checker.h"
#include "checks.h"

namespace llmserve::isa_check {

namespace {

void check_sampling_case(Checker& check, int64_t vocabulary, bool has_ties) {
  const std::vector<int32_t> banned{0, static_cast<int32_t>(vocabulary / 2), -3, 1 << 30};
  const std::vector<TokenBias> biases{{0, 3.5f}, {static_cast<int32_t>(vocabulary - 1), -2.0f}};
  const std::vector<TokenCount> counts{{static_cast<int32_t>(vocabulary / 3), 2, true},
                                       {static_cast<int32_t>(vocabulary - 1), 0, true}};
  std::vector<uint32_t> allowed(static_cast<size_t>((vocabulary + 31) / 32), 0xa5a5a5a5u);
  if (allowed.size() > 2) allowed[1] = 0xffffffffu;
  const std::vector<int32_t> reported{static_cast<int32_t>(vocabulary / 2), 0};
  std::vector<SampleRow> rows;
  for (const float temperature : {0.0f, 0.7f, 1.0f, 3.0f}) {
    for (int filter = 0; filter < 6; ++filter) {
      SampleRow row;
      row.draw.temperature = temperature;
      row.seed = mix64(rows.size());
      row.position = filter % 2 == 0 ? 3 : 5'000'000'000;
      row.num_top = std::max(-1, filter - 2);
      if (filter == 1 || filter == 5) row.draw.top_k = 4;
      if (filter == 2 || filter == 5) row.draw.top_p = 0.8f;
      if (filter == 3 || filter == 5) row.draw.min_p = 0.05f;
      if (filter == 4 || filter == 5) row.banned_token_ids = banned;
      if (filter == 2 || filter == 4) row.allowed = allowed;
      if (filter == 1 || filter == 4) row.biases = biases;
      if (filter == 3 || filter == 4) row.counts = counts;
      row.draw.repetition_penalty = 1.5f;
      row.draw.frequency_penalty = 0.25f;
      row.draw.presence_penalty = -0.5f;
      row.reported_token_ids = reported;
      rows.push_back(row);
    }
  }
  const int64_t count = static_cast<int64_t>(rows.size());
  const int64_t stride = vocabulary + 1;
  const Floats logits = normal(count * stride - 1, 17);
  for (float& x : logits) x = has_ties ? std::floor(x * 3) : x * 3;
  logits[stride * 20] = -kInf;
  logits[stride * 21 + vocabulary - 1] = kNan;
  logits[stride * 22 + vocabulary / 2] = kInf;
  std::fill_n(logits.begin() + stride * 23, vocabulary, -kInf);
  const auto run = [&](Backend& backend, int64_t row, int64_t num_rows) {
    std::vector<SampledRow> out(static_cast<size_t>(num_rows));
    backend.sample(
        {.logits = matrix(logits, count, vocabulary, stride).slice(0, row, num_rows),
         .rows = std::span(rows).subspan(static_cast<size_t>(row), static_cast<size_t>(num_rows)),
         .out = out});
    return out;
  };
  const auto near = [](float a, float b) {
    return a == b || std::fabs(a - b) <= 2e-6f * std::max(1.0f, std::fabs(b));  // both may be -inf
  };
  const auto agree = [&](const SampledRow& a, const SampledRow& b) {
    bool same = a.is_valid == b.is_valid;
    if (!same || !b.is_valid) return same;
    same = a.token_id == b.token_id && a.rank == b.rank && near(a.logprob, b.logprob) &&
           a.top.size() == b.top.size() && a.reported.size() == b.reported.size();
    const auto agree_on = [&](const TopToken& x, const TopToken& y) {
      return x.token_id == y.token_id && x.rank == y.rank && near(x.logprob, y.logprob);
    };
    return same && std::ranges::equal(a.top, b.top, agree_on) &&
           std::ranges::equal(a.reported, b.reported, agree_on);
  };
  const std::vector<SampledRow> want = run(*check.ref, 0, count);
  for (const Isa& isa : check.isas) {
    const std::vector<SampledRow> all = run(*isa.backend, 0, count);
    for (int64_t r = 0; r < count; ++r) {
      const size_t i = static_cast<size_t>(r);
      const std::string what =
          concat(isa.name, " sample V ", vocabulary, has_ties ? " ties" : "", " row ", r);
      check.report(agree(all[i], want[i]),
                   concat(what, ": token ", all[i].token_id, ", expected ", want[i].token_id));
      const SampledRow alone = run(*isa.backend, r, 1)[0];
      check.report(agree(alone, all[i]) && (!alone.is_valid || alone.logprob == all[i].logprob),
                   concat(what, " alone"));
    }
  }
}

}  // namespace

void check_sampling(Checker& check) {
  for (const int64_t vocabulary : {1, 2, 5, 17, 63, 64, 65, 130, 1000, 4099})
    for (const bool has_ties : {false, true}) check_sampling_case(check, vocabulary, has_ties);
}

}  // namespace llmserve::isa_check
