#include "kernels/cuda/linear/wgmma_linear.h"

#include "core/error.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/linear/wgmma_linear_check.h"

namespace llmserve::cuda {

std::unique_ptr<WgmmaLinear> WgmmaLinear::open(DeviceMemory& memory, int major, int minor,
                                               int num_sms, std::string& problem) {
  if (!kHasWgmmaProduct || major != 9 || minor != 0) {
    problem = "expected compute capability 9.0 and a build for it";
    return nullptr;
  }
  const std::optional<TensorMaps> maps = TensorMaps::find(problem);
  if (!maps) return nullptr;
  prepare_wgmma_product();
  return std::unique_ptr<WgmmaLinear>(new WgmmaLinear(memory, *maps, num_sms));
}

const std::string& WgmmaLinear::find_problem() {
  if (problem_) return *problem_;
  try {
    problem_ = find_wgmma_problem(
        [this](const uint16_t* x, const LinearParams& params, const Activation* gate,
               uint16_t* rounded, const WgmmaForm& form) { run(x, params, gate, rounded, form); },
        memory_);
  } catch (const NotSupported& error) {
    problem_ = error.what();
  }
  return *problem_;
}

WgmmaLinear::WgmmaLinear(DeviceMemory& memory, const TensorMaps& maps, int num_sms)
    : memory_(memory), maps_(maps), num_sms_(num_sms), working_(kWorkingBytes, memory) {
  check("cudaMemsetAsync of counters", cudaMemsetAsync(working_.data() + kWgmmaPartialBytes, 0,
                                                       kWgmmaArrivals * 4, memory.stream()));
}

bool WgmmaLinear::can_multiply(const LinearParams& params) {
  return params.storage == Storage::kBF16 && params.in_features > 0 &&
         params.in_features % 8 == 0 && is_aligned(params.weight);
}

void WgmmaLinear::run(const uint16_t* x, const LinearParams& p, const Activation* gate,
                      uint16_t* rounded, const WgmmaForm& form) const {
  if (p.num_rows == 0 || p.out_features == 0) return;
  const int box_rows = form.groups * kWgmmaGroupRows;
  run_wgmma_product(
      {.weight = gate ? maps_.halves(p.weight, p.out_features, p.in_features, box_rows)
                      : maps_.rows(p.weight, p.out_features, p.in_features, box_rows),
       .x = maps_.rows(x, p.num_rows, p.in_features, form.columns),
       .form = form,
       .bias = p.bias,
       .out = p.out,
       .rounded = rounded,
       .partials = reinterpret_cast<float*>(working_.data()),
       .arrivals = reinterpret_cast<int32_t*>(working_.data() + kWgmmaPartialBytes),
       .num_rows = p.num_rows,
       .out_features = p.out_features,
       .in_features = p.in_features,
       .accumulate = p.accumulate,
       .is_gated = gate != nullptr,
       .activation = gate ? *gate : Activation::kSilu},
      num_sms_, memory_.stream());
}

}  // namespace llmserve::cuda
