#include "kernels/cuda/linear/wgmma_linear_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/trial_numbers.h"

namespace llmserve::cuda {
namespace {

// Three splits, since two would be the same in either order, and a last stage that is partly
// filled; a tile of the weight that is, too.
constexpr int64_t kDepth = 1544;
constexpr int64_t kOutputs = 48;
// Two tiles in every form but the widest, the last one partly filled.
constexpr int64_t kRows = 70;
// Both kernels add the same products of bf16 in float32, in different orders: some 2^-22 of the
// terms' magnitudes, and results are a fiftieth of these.
constexpr float kTolerance = 0x1p-12f;

struct Trial {
  const uint16_t* x;
  LinearParams params;
  DeviceMemory& memory;

  // Nothing that was there before passes for a result.
  void clear() const {
    check("cudaMemsetAsync of a trial",
          cudaMemsetAsync(params.out.data, 0xff, kRows * kOutputs * 4, memory.stream()));
  }
  std::vector<float> read(int64_t count) const {
    std::vector<float> result(static_cast<size_t>(count));
    memory.copy_to_host(result.data(), params.out.data, count * 4);
    return result;
  }
};

// The first row whose bits are not those of `expected`, from row `begin` of it on; -1: none.
int64_t find_other_bits(const std::vector<float>& got, const std::vector<float>& expected,
                        int64_t begin, int64_t width) {
  const int64_t rows = std::ssize(got) / width;
  for (int64_t row = 0; row < rows; ++row) {
    if (std::memcmp(&got[static_cast<size_t>(row * width)],
                    &expected[static_cast<size_t>((begin + row) * width)],
                    static_cast<size_t>(width) * 4) != 0)
      return row;
  }
  return -1;
}

}  // namespace

std::string find_wgmma_problem(const WgmmaRun& multiply, DeviceMemory& memory) {
  static_assert(wgmma_splits(kDepth) == 3 && kDepth % kWgmmaDepth != 0);
  TrialNumbers numbers;
  const Buffer x = upload(numbers.bf16(kRows * kDepth), memory);
  const Buffer weight = upload(numbers.bf16(kOutputs * kDepth), memory);
  const Buffer bias = upload(numbers.floats(kOutputs), memory);
  const Buffer out(kRows * kOutputs * 4, memory);
  Trial trial{.x = reinterpret_cast<const uint16_t*>(x.data()),
              .params = {.x = {nullptr, 0},
                         .weight = weight.data(),
                         .storage = Storage::kBF16,
                         .bias = reinterpret_cast<const float*>(bias.data()),
                         .out = {reinterpret_cast<float*>(out.data()), kOutputs},
                         .num_rows = kRows,
                         .out_features = kOutputs,
                         .in_features = kDepth,
                         .accumulate = false},
              .memory = memory};
  trial.clear();
  mma_linear(trial.x, trial.params, memory.stream());
  const std::vector<float> expected = trial.read(kRows * kOutputs);

  const auto run = [&](int64_t begin, int64_t rows, const WgmmaForm& form, const Activation* gate) {
    LinearParams params = trial.params;
    params.num_rows = rows;
    if (gate) params.out.stride = kOutputs / 2;
    trial.clear();
    multiply(trial.x + begin * kDepth, params, gate, nullptr, form);
    return trial.read(rows * params.out.stride);
  };
  const WgmmaForm first{2, 128, 1};
  const std::vector<float> whole = run(0, kRows, first, nullptr);
  float largest = 0.0f;
  float difference = 0.0f;
  for (size_t i = 0; i < whole.size(); ++i) {
    largest = std::max(largest, std::abs(expected[i]));
    difference = std::max(difference, std::abs(whole[i] - expected[i]));
    if (!std::isfinite(whole[i])) return "wgmma gives what is not finite";
  }
  if (!(difference <= kTolerance * largest))
    return concat("wgmma differs from mma by ", difference / largest);

  const auto activation = Activation::kSilu;
  const Buffer gated_out(kRows * kOutputs * 2, memory);
  cuda::activation({trial.params.out.data, kOutputs}, kRows, kOutputs / 2, activation, true,
                   {reinterpret_cast<float*>(gated_out.data()), kOutputs / 2}, memory.stream());
  std::vector<float> gated(static_cast<size_t>(kRows * kOutputs / 2));
  memory.copy_to_host(gated.data(), gated_out.data(), gated_out.num_bytes());

  // Rows of two tiles or of one, from the first on and from within.
  const auto find_other = [&](const WgmmaForm& form, int64_t begin, int64_t rows, bool is_gated) {
    const std::vector<float> got = run(begin, rows, form, is_gated ? &activation : nullptr);
    const int64_t row = is_gated ? find_other_bits(got, gated, begin, kOutputs / 2)
                                 : find_other_bits(got, whole, begin, kOutputs);
    if (row < 0) return std::string();
    return concat("wgmma of ", form.columns, " columns by ", form.groups, " warpgroups",
                  form.sharing > 1 ? " that share K" : "", is_gated ? ", gated," : "",
                  " has other bits than of ", first.columns, " in row ", begin + row, " of ", rows);
  };
  constexpr std::array kForms{WgmmaForm{1, 8, 1},  WgmmaForm{1, 16, 3}, WgmmaForm{1, 32, 1},
                              WgmmaForm{1, 64, 3}, WgmmaForm{2, 32, 3}, WgmmaForm{2, 64, 1},
                              WgmmaForm{2, 128, 1}};
  for (WgmmaForm form : kForms) {
    std::string problem;
    if (form.columns < first.columns)
      problem = find_other(form, 0, std::min<int64_t>(form.columns + 1, kRows), false);
    form.sharing = wgmma_splits(kDepth) + 1 - form.sharing;
    if (problem.empty()) problem = find_other(form, 5, 7, true);
    if (!problem.empty()) return problem;
  }
  return {};
}

}  // namespace llmserve::cuda
