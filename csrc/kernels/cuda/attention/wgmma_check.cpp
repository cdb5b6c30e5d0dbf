#include "kernels/cuda/attention/wgmma_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/cuda/attention/tiled_kernels.h"
#include "kernels/cuda/attention/wgmma_kernels.h"
#include "kernels/cuda/trial_numbers.h"

namespace llmserve::cuda {
namespace {

// Rows of two tiles, the second one partly filled, and positions of two.
constexpr int32_t kTokens = 100;
constexpr int32_t kContext = 150;
constexpr int64_t kGroup = 2;
constexpr int64_t kBlockSize = 16;
constexpr int32_t kBlocks = 10;

}  // namespace

float wgmma_difference(int64_t width, int64_t shared_bytes, DeviceMemory& memory) {
  TrialNumbers numbers;
  const int64_t num_outputs = kTokens * kGroup * width;
  const Buffer q = upload(numbers.floats(num_outputs), memory);
  const int64_t pool = kBlocks * kBlockSize * width;
  const Buffer keys = upload(numbers.bf16(pool), memory);
  const Buffer values = upload(numbers.bf16(pool), memory);
  std::vector<int32_t> table(kBlocks);
  std::iota(table.rbegin(), table.rend(), 0);
  const Buffer integers = upload(std::vector<int32_t>{0, kTokens, kContext}, memory);
  const Buffer blocks = upload(table, memory);
  const Buffer out(num_outputs * 4, memory);
  const CachePart part{.data = keys.data(),
                       .num_heads = 1,
                       .block_size = kBlockSize,
                       .width = width,
                       .head_stride = kBlockSize * width,
                       .row_stride = width};
  CachePart value_part = part;
  value_part.data = values.data();
  const auto* starts = reinterpret_cast<const int32_t*>(integers.data());
  AttentionParams params{.q = reinterpret_cast<const float*>(q.data()),
                         .q_token_stride = kGroup * width,
                         .q_head_stride = width,
                         .keys = part,
                         .values = value_part,
                         .storage = Storage::kBF16,
                         .query_starts = starts,
                         .kv_lens = starts + 2,
                         .block_tables = reinterpret_cast<const int32_t*>(blocks.data()),
                         .num_sequences = 1,
                         .max_blocks = kBlocks,
                         .num_tokens = kTokens,
                         .num_heads = kGroup,
                         .scale = 6.0f / std::sqrt(static_cast<float>(width)),  // weights differ
                         .window = 0,
                         .soft_cap = 0.0f,
                         .sinks = nullptr,
                         .out = reinterpret_cast<float*>(out.data()),
                         .out_token_stride = kGroup * width,
                         .out_head_stride = width};
  const auto outputs = [&] {
    std::vector<float> result(static_cast<size_t>(num_outputs));
    memory.copy_to_host(result.data(), out.data(), num_outputs * 4);
    return result;
  };
  const TiledKernels tiled = tiled_kernels_bf16(width);
  tiled.prepare(shared_bytes);
  TiledPlan plan;
  plan.add(kTokens * kGroup, kContext, static_cast<int>(width));
  tiled.run(params, plan, {}, memory.stream());
  const std::vector<float> expected = outputs();
  params.wgmma_rows = 0;
  const WgmmaKernels wgmma = wgmma_kernels(width);
  wgmma.prepare();
  wgmma.run(params, ceil_div(kTokens * kGroup, kWgmmaRows), memory.stream());
  const std::vector<float> got = outputs();

  float largest = 0.0f;
  float difference = 0.0f;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i]) || !std::isfinite(expected[i]))
      return std::numeric_limits<float>::infinity();
    largest = std::max(largest, std::abs(expected[i]));
    difference = std::max(difference, std::abs(got[i] - expected[i]));
  }
  return difference / largest;
}

}  // namespace llmserve::cuda
