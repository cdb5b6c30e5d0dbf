// One call of the sample op as the kernels take it: what the rows ask for as bytes that go over in
// one copy, and where the answers lie in what comes back in one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/sampling/device_counts.h"
#include "kernels/ops.h"

namespace llmserve::cuda {

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

class SampleCall {
 public:
  SampleCall() = default;
  // late_tokens [S], or empty: where on the device a row's late token is (LateTokens), or null.
  // kept [S], or empty: counts that stay in `lists`, which is null where there are none.
  SampleCall(const ConstTensor& logits, std::span<const SampleRow> rows,
             std::span<const int32_t* const> late_tokens = {},
             std::span<const KeptCounts> kept = {}, DeviceCounts* lists = nullptr);

  // What the rows ask for, their lists included, and its bytes: straight to where it is copied
  // from. `asked` is where on the device it will be. What the rows refer to must be there still,
  // and is not needed afterwards.
  int64_t asked_bytes() const { return asked_layout_.num_bytes(); }
  void write_asked(std::byte* to, const std::byte* asked);
  int64_t answer_bytes() const { return answers_.num_bytes(); }
  // Of the draw's working memory.
  int64_t weight_bytes() const {
    return rows_.count * vocabulary_ * static_cast<int64_t>(sizeof(float));
  }

  // `asked` is where on the device that is, written to meanwhile; drawn [S]. Work goes to
  // `stream`.
  void launch(std::byte* asked, std::byte* answers, std::byte* weights, DrawnRow* drawn,
              cudaStream_t stream) const;
  // Both on the host: what launch() wrote.
  void read(const DrawnRow* drawn, const std::byte* answers, std::span<SampledRow> out) const;

 private:
  // What a row wants to know besides its token.
  struct Wanted {
    int32_t num_top = -1;  // at most V; -1: nothing
    std::vector<int32_t> token_ids;
  };

  // An array among what is asked for, as the caller has it.
  struct Part {
    int64_t begin;
    const void* from;
    size_t num_bytes;
  };

  template <class T>
  DrawList add(std::span<const T> values);
  DrawList add(std::span<const TokenCount> counts);
  DrawRow draw_row(const SampleRow& row, const float* raw, const int32_t* late_token,
                   const KeptCounts& kept, DeviceCounts* lists);

  int64_t vocabulary_ = 0;
  Layout asked_layout_;
  std::vector<Part> parts_;
  std::vector<std::pair<int64_t, std::span<const TokenCount>>> counts_;  // likewise, as DrawCount
  std::vector<std::pair<size_t, const DrawCount*>> kept_;                // by rows of draw_rows_
  std::vector<DrawRow> draw_rows_;
  std::vector<ReportRow> report_rows_;
  std::vector<RankQuery> rank_queries_;
  std::vector<CountUpdate> count_updates_;
  DrawList rows_;               // DrawRow
  DrawList reports_;            // ReportRow, of the rows with num_top >= 0
  DrawList updates_;            // CountUpdate
  DrawList queries_;            // RankQuery: of each such row its token, then its reported ones
  std::vector<Wanted> wanted_;  // [S]
  Layout answers_;
  int64_t reports_begin_ = 0;  // Report, of answers_
  int64_t ranked_begin_ = 0;   // Ranked
  int64_t top_begin_ = 0;      // TopEntry
};

}  // namespace llmserve::cuda
