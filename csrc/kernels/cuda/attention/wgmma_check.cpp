#include "kernels/cuda/attention/wgmma_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/buffer.h"
#include "core/float_types.h"
#include "kernels/cuda/attention/tiled_kernels.h"
#include "kernels/cuda/attention/wgmma_kernels.h"

namespace llmserve::cuda {
namespace {

// Rows of two tiles, the second one partly filled, and positions of two.
constexpr int32_t kTokens = 100;
constexpr int32_t kContext = 150;
constexpr int64_t kGroup = 2;
constexpr int64_t kBlockSize = 16;
constexpr int32_t kBlocks = 10;

// In [-1, 1), the same everywhere: numbers by Knuth's MMIX constants.
class Numbers {
 public:
  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(state_ >> 40) * 0x1p-23f - 1.0f;
  }
  template <class T, class Convert>
  std::vector<T> take(int64_t count, Convert convert) {
    std::vector<T> values(static_cast<size_t>(count));
    std::ranges::generate(values, [&] { return convert(next()); });
    return values;
  }

 private:
  uint64_t state_ = 1;
};

template <class T>
Buffer upload(const std::vector<T>& values, DeviceMemory& memory) {
  const auto num_bytes = static_cast<int64_t>(values.size() * sizeof(T));
  Buffer buffer(num_bytes, memory);
  memory.copy_from_host(buffer.data(), values.data(), num_bytes);
  return buffer;
}

}  // namespace

float wgmma_difference(int64_t width, int64_t shared_bytes, DeviceMemory& memory) {
  Numbers numbers;
  const auto as_bf16 = [](float value) { return f32_to_bf16(value); };
  const int64_t num_outputs = kTokens * kGroup * width;
  const Buffer q = upload(numbers.take<float>(num_outputs, [](float x) { return x; }), memory);
  const int64_t pool = kBlocks * kBlockSize * width;
  const Buffer keys = upload(numbers.take<uint16_t>(pool, as_bf16), memory);
  const Buffer values = upload(numbers.take<uint16_t>(pool, as_bf16), memory);
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
