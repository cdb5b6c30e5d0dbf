// Sampling: rows that only draw are drawn on the device; rows that are edited first or that report
// log-probabilities are copied to the host and drawn there, which makes the same choice from the
// same logits.
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_check.h"

namespace llmserve::cuda {
namespace {

bool only_draws(const SampleRow& row) {
  const bool is_edited = row.draw_logits || !row.biases.empty() || !row.allowed.empty() ||
                         !row.banned_token_ids.empty() || !row.counts.empty();
  return !is_edited && row.forced_token_id < 0 && row.num_top < 0;
}

}  // namespace

void CudaBackend::sample(const SampleArgs& args) {
  validate(args);
  memory_.make_current();
  std::vector<size_t> on_device;
  std::vector<size_t> on_host;
  for (size_t i = 0; i < args.rows.size(); ++i)
    (only_draws(args.rows[i]) ? on_device : on_host).push_back(i);
  draw_on_device(args, on_device);
  for (const size_t i : on_host) draw_on_host(args, i);
}

void CudaBackend::draw_on_device(const SampleArgs& args, std::span<const size_t> which) {
  if (which.empty()) return;
  const int64_t vocabulary = args.logits.shape[1];
  const auto num_rows = static_cast<int64_t>(which.size());
  std::vector<DrawRow> rows;
  for (const size_t i : which) {
    const SampleRow& row = args.rows[i];
    const float* x = args.logits.as<float>() + static_cast<int64_t>(i) * args.logits.strides[0];
    rows.push_back({.raw = x,
                    .x = x,
                    .temperature = row.temperature,
                    .top_p = row.top_p,
                    .min_p = row.min_p,
                    .top_k = row.top_k,
                    .seed = row.seed,
                    .position = row.position});
  }
  const int64_t out_bytes = num_rows * static_cast<int64_t>(sizeof(Drawn));
  const int64_t out_begin = num_rows * vocabulary * static_cast<int64_t>(sizeof(float));
  std::byte* memory = scratch(out_begin + out_bytes);
  draw(draw_rows_(std::span<const DrawRow>(rows)), num_rows, vocabulary,
       reinterpret_cast<float*>(memory), reinterpret_cast<Drawn*>(memory + out_begin), stream());
  std::vector<Drawn> drawn(which.size());
  memory_.copy_to_host(drawn.data(), memory + out_begin, out_bytes);
  for (size_t i = 0; i < which.size(); ++i) {
    SampledRow& out = args.out[which[i]];
    out = SampledRow{};
    out.token_id = drawn[i].token_id;
    out.is_valid = drawn[i].is_valid != 0;
    out.is_raw_valid = drawn[i].is_raw_valid != 0;
  }
}

void CudaBackend::draw_on_host(const SampleArgs& args, size_t i) {
  const int64_t vocabulary = args.logits.shape[1];
  std::vector<float> logits(static_cast<size_t>(vocabulary));
  memory_.copy_to_host(logits.data(),
                       args.logits.as<float>() + static_cast<int64_t>(i) * args.logits.strides[0],
                       vocabulary * static_cast<int64_t>(sizeof(float)));
  host_->sample({.logits = ConstTensor(logits.data(), DType::kF32, {1, vocabulary}),
                 .rows = args.rows.subspan(i, 1),
                 .out = args.out.subspan(i, 1)});
}

}  // namespace llmserve::cuda
