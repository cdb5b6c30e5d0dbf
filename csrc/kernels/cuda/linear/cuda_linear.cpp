// Products: which kernel or library does one, and with what before and after it.
#include <array>
#include <limits>

#include "kernels/cuda/argument_views.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/linear/stopwatch.h"
#include "kernels/cuda/linear/wgmma_linear.h"

namespace llmserve::cuda {
namespace {

LinearParams params_of(const LinearArgs& args) {
  const LinearWeight& weight = *args.weight;
  return {.x = rows_of(args.x),
          .weight = weight.data.data(),
          .storage = storage_of(weight.dtype),
          .bias = args.bias.as<float>(),
          .out = rows_of(args.out),
          .num_rows = args.x.shape[0],
          .out_features = weight.out_features,
          .in_features = weight.in_features,
          .accumulate = args.accumulate};
}

}  // namespace

void CudaBackend::do_linear(const LinearArgs& args) {
  if (args.weight->format) return quantized_linear(args);
  const LinearParams params = params_of(args);
  check_grid("linear", params.num_rows);
  memory_.make_current();
  if (params.num_rows == 0 || params.out_features == 0) return;
  if (uses_mma_gemv(params, {})) return mma_gemv(params, {}, stream());
  if (uses_gemv(params.num_rows)) return gemv(params, {}, stream());
  uint16_t* rounded = nullptr;
  if (takes_rounded(params)) {
    rounded = rounded_rows(params);
    round_to_bf16(params.x, params.num_rows, params.in_features, rounded, stream());
  }
  if (!multiply(params, rounded)) plain_linear(params, stream());
}

bool CudaBackend::uses_mma(const LinearParams& params) const {
  return uses_mma_ && WgmmaLinear::can_multiply(params);
}

uint16_t* CudaBackend::rounded_rows(const LinearParams& params) {
  return reinterpret_cast<uint16_t*>(scratch(params.num_rows * params.in_features * 2));
}

bool CudaBackend::multiply(const LinearParams& params, const uint16_t* rounded,
                           const GatedActivationArgs* gate) {
  if (uses_wgmma(params, rounded)) {
    if (gate && WgmmaLinear::can_gate(params)) {
      LinearParams gated = params;
      gated.out = rows_of(gate->out);
      wgmma_linear_->multiply_gated(rounded, gated, gate->activation);
      return true;
    }
    wgmma_linear_->multiply(rounded, params);
  } else if (uses_mma(params)) {
    mma_linear(rounded, params, stream());
  } else if (!uses_cublaslt(params)) {
    return false;
  } else if (rounded ? !cublaslt_->multiply(rounded, params.in_features, params)
                     : !cublaslt_->multiply(params.x.data, params.x.stride, params)) {
    return false;
  }
  if (gate) do_gated_activation(*gate);
  return true;
}

bool CudaBackend::uses_wgmma(const LinearParams& params, const uint16_t* rounded) {
  if (!wgmma_linear_ || !rounded || !WgmmaLinear::can_multiply(params)) return false;
  return uses_mma_ || is_wgmma_faster(params, rounded);
}

// By the first product of each shape's bucket; no algorithm of the library's is tried twice, since
// it has chosen its own by then.
bool CudaBackend::is_wgmma_faster(const LinearParams& params, const uint16_t* rounded) {
  const WgmmaBucket key = bucket_of(params);
  if (const auto known = wgmma_is_faster_.find(key); known != wgmma_is_faster_.end())
    return known->second;
  if (is_capturing(stream())) return false;
  if (const std::string& problem = wgmma_linear_->find_problem(); !problem.empty()) {
    wgmma_problem_ += concat(", products without wgmma: ", problem);
    wgmma_linear_.reset();
    return false;
  }
  // Nothing that is added to may be touched yet.
  LinearParams trial = params;
  trial.accumulate = false;
  Buffer elsewhere;
  if (params.accumulate) {
    const int64_t num_bytes = params.num_rows * params.out_features * 4;
    if (num_bytes > memory_.available_bytes() / 2) return false;
    elsewhere = Buffer(num_bytes, memory_);
    trial.out = {reinterpret_cast<float*>(elsewhere.data()), params.out_features};
  }
  Stopwatch watch(stream());
  const auto time_of = [&](const auto& run) {
    if (!run()) return std::numeric_limits<float>::infinity();
    watch.start();
    for (int repeat = 0; repeat < kTimedRuns; ++repeat) run();
    return watch.stop();
  };
  const float library =
      time_of([&] { return cublaslt_->multiply(rounded, params.in_features, trial); });
  const float own = time_of([&] {
    wgmma_linear_->multiply(rounded, trial);
    return true;
  });
  return wgmma_is_faster_[key] = own < kWorthwhile * library;
}

void CudaBackend::do_fused_linear(const FusedLinearArgs& args) {
  const bool is_plain = !args.norm && !args.gate;
  const int64_t num_rows = args.linear.x.shape[0];
  if (args.linear.weight->format && !is_plain) {
    fuse_in_rounding(args);
    if (args.gate) do_gated_activation(*args.gate);
    return;
  }
  if (is_plain || num_rows == 0 || args.linear.x.shape[1] == 0 || args.linear.out.shape[1] == 0)
    return Backend::do_fused_linear(args);
  if (fuse_in_mma_gemv(args)) return;
  if (uses_gemv(num_rows)) return fuse_in_gemv(args);
  if (args.norm && norm_rounded(args)) return;
  Backend::do_fused_linear(args);
}

LinearFusion CudaBackend::fusion_of(const FusedLinearArgs& args) {
  LinearFusion fusion;
  if (args.norm) {
    fusion.norm_weight = args.norm->weight.as<float>();
    fusion.norm = args.norm->numbers;
    fusion.norm_threads = rms_threads(args.linear.weight->in_features);
  }
  if (args.gate) {
    fusion.is_gated = true;
    fusion.activation = args.gate->activation;
  }
  return fusion;
}

// False if the kernel cannot, and then nothing has been written.
bool CudaBackend::fuse_in_mma_gemv(const FusedLinearArgs& args) {
  LinearParams params = params_of(args.linear);
  const LinearFusion fusion = fusion_of(args);
  if (args.norm) params.x = rows_of(args.norm->x);
  if (args.gate) params.out = rows_of(args.gate->out);
  if (!uses_mma_gemv(params, fusion)) return false;
  memory_.make_current();
  mma_gemv(params, fusion, stream());
  return true;
}

void CudaBackend::fuse_in_gemv(const FusedLinearArgs& args) {
  memory_.make_current();
  LinearParams params = params_of(args.linear);
  LinearFusion fusion = fusion_of(args);
  if (args.norm && params.num_rows <= kGemvNormMaxRows) {
    params.x = rows_of(args.norm->x);
  } else if (args.norm) {
    fusion.norm_weight = nullptr;
    do_rms_norm(*args.norm);
  }
  if (args.gate) params.out = rows_of(args.gate->out);
  gemv(params, fusion, stream());
}

void CudaBackend::round_normed(const RmsNormArgs& norm, uint16_t* to) {
  cuda::rms_norm({.x = rows_of(norm.x),
                  .residual = {nullptr, 0},
                  .weight = norm.weight.as<float>(),
                  .out = {nullptr, 0},
                  .num_rows = norm.x.shape[0],
                  .width = norm.x.shape[1],
                  .numbers = norm.numbers,
                  .rounded = to},
                 stream());
}

// The norm writes what the product reads; false if nothing takes bf16 or does this product, and
// then nothing that anybody reads has been written.
bool CudaBackend::norm_rounded(const FusedLinearArgs& args) {
  const LinearParams params = params_of(args.linear);
  if (!takes_rounded(params)) return false;
  check_grid("linear", params.num_rows);
  memory_.make_current();
  uint16_t* rounded = rounded_rows(params);
  round_normed(*args.norm, rounded);
  return multiply(params, rounded, args.gate ? &*args.gate : nullptr);
}

// The gate writes bf16, which is what the second product reads; false if wgmma_linear does not do
// both products, or has not been compared with the library's yet.
bool CudaBackend::fuse_in_wgmma(const FusedMlpArgs& args) {
  if (!wgmma_linear_ || args.up.linear.weight->format || args.down.weight->format) return false;
  const LinearParams up = params_of(args.up.linear);
  const LinearParams down = params_of(args.down);
  const auto is_taken = [&](const LinearParams& params) {
    if (!WgmmaLinear::can_multiply(params)) return false;
    const auto known = wgmma_is_faster_.find(bucket_of(params));
    return uses_mma_ ||
           (!uses_gemv(params.num_rows) && known != wgmma_is_faster_.end() && known->second);
  };
  if (up.num_rows == 0 || up.num_rows > kMlpRows || !WgmmaLinear::can_gate(up) || !is_taken(up) ||
      !is_taken(down))
    return false;
  check_grid("fused_mlp", up.num_rows);
  memory_.make_current();
  const int64_t up_elements = up.num_rows * up.in_features;
  auto* rounded =
      reinterpret_cast<uint16_t*>(scratch((up_elements + down.num_rows * down.in_features) * 2));
  uint16_t* gated = rounded + up_elements;
  if (args.up.norm)
    round_normed(*args.up.norm, rounded);
  else
    round_to_bf16(up.x, up.num_rows, up.in_features, rounded, stream());
  wgmma_linear_->multiply_gated(rounded, up, args.up.gate->activation, gated);
  wgmma_linear_->multiply(gated, down);
  return true;
}

}  // namespace llmserve::cuda
