#include "engine/pooler.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace llmserve {
namespace {

bool all_finite(const float* values, int64_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

// The first `width` elements of a hidden state, to an L2 norm of 1 if wanted.
void store_vector(const float* state, const PoolingParams& params, int64_t width, float* to) {
  std::copy_n(state, width, to);
  if (!params.normalize) return;
  double sum = 0;
  for (int64_t i = 0; i < width; ++i)
    sum += static_cast<double>(to[i]) * static_cast<double>(to[i]);
  const double norm = std::max(std::sqrt(sum), 1e-12);
  for (int64_t i = 0; i < width; ++i) to[i] = static_cast<float>(static_cast<double>(to[i]) / norm);
}

}  // namespace

std::shared_ptr<PooledOutput> make_pooled_output(const PoolingParams& params, int64_t num_tokens,
                                                 int64_t hidden_size, int64_t vocab_size) {
  const PooledShape shape = pooled_shape(params, num_tokens, hidden_size, vocab_size);
  auto output = std::make_shared<PooledOutput>();
  output->params = params;
  output->num_prompt_tokens = num_tokens;
  output->values = HostArray(shape.num_rows, shape.width);
  if (params.task == PoolingTask::kEmbed && params.pooling == PoolingType::kMean) {
    output->sum.resize(static_cast<size_t>(hidden_size));
  }
  return output;
}

void Pooler::take(const ConstTensor& hidden, const ModelInput& input, const StepPlan& plan) {
  row_.resize(static_cast<size_t>(hidden.shape[1]));
  for (const PooledSequence& pooled : plan.pooled) {
    const size_t idx = static_cast<size_t>(pooled.sequence_idx);
    const ScheduledSequence& sequence = plan.sequences[idx];
    const Chunk chunk{.begin = input.query_starts[idx],
                      .count = sequence.num_tokens,
                      .position = sequence.start_position};
    PooledOutput& out = *pooled.output;
    if (chunk.position == 0) out.is_finite = true;
    switch (out.params.task) {
      case PoolingTask::kEmbed:
        take_vector(hidden, chunk, out);
        break;
      case PoolingTask::kTokenEmbed:
        take_states(hidden, chunk, out);
        break;
      case PoolingTask::kTokenLogits:  // take_logits()
        break;
    }
  }
}

void Pooler::take_logits(const ConstTensor& logits, const PooledRows& rows) {
  PooledOutput& out = *rows.output;
  float* const to = out.values.row(rows.position);
  copy_rows(logits, 0, rows.count, to);
  out.is_finite &= all_finite(to, rows.count * out.values.width);
}

void Pooler::copy_rows(const ConstTensor& rows, int64_t begin, int64_t count, float* to) {
  const ConstTensor part = rows.slice(0, begin, count);
  memory_.copy_to_host(to, part.data, part.num_bytes());
}

void Pooler::take_states(const ConstTensor& hidden, const Chunk& chunk, PooledOutput& out) {
  for (int64_t i = 0; i < chunk.count; ++i) {
    copy_rows(hidden, chunk.begin + i, 1, row_.data());
    float* const to = out.values.row(chunk.position + i);
    store_vector(row_.data(), out.params, out.values.width, to);
    out.is_finite &= all_finite(to, out.values.width);
  }
}

void Pooler::take_vector(const ConstTensor& hidden, const Chunk& chunk, PooledOutput& out) {
  const int64_t end = chunk.position + chunk.count;
  const bool is_last = end == out.num_prompt_tokens;
  switch (out.params.pooling) {
    case PoolingType::kCls:
      if (chunk.position > 0) return;
      copy_rows(hidden, chunk.begin, 1, row_.data());
      break;
    case PoolingType::kLast:
      if (!is_last) return;
      copy_rows(hidden, chunk.begin + chunk.count - 1, 1, row_.data());
      break;
    case PoolingType::kMean:
      add_to_sum(hidden, chunk, out);
      if (!is_last) return;
      for (size_t i = 0; i < row_.size(); ++i)
        row_[i] = static_cast<float>(out.sum[i] / static_cast<double>(end));
      break;
  }
  store_vector(row_.data(), out.params, out.values.width, out.values.row(0));
  out.is_finite &= all_finite(out.values.row(0), out.values.width);
}

// One token after the other, so that the sum does not depend on the chunks.
void Pooler::add_to_sum(const ConstTensor& hidden, const Chunk& chunk, PooledOutput& out) {
  if (chunk.position == 0) std::ranges::fill(out.sum, 0.0);
  for (int64_t i = 0; i < chunk.count; ++i) {
    copy_rows(hidden, chunk.begin + i, 1, row_.data());
    for (size_t e = 0; e < row_.size(); ++e) out.sum[e] += static_cast<double>(row_[e]);
  }
}

}  // namespace llmserve
