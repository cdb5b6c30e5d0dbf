// Products: which kernel or library does one, and with what before and after it.
#include "kernels/cuda/argument_views.h"
#include "kernels/cuda/cuda_backend.h"

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

// Of the weight alone: another product of the same weight has other bits.
bool CudaBackend::uses_mma(const LinearParams& params) const {
  return uses_mma_ && params.storage == Storage::kBF16 && params.in_features > 0 &&
         params.in_features % 8 == 0 && reinterpret_cast<uintptr_t>(params.weight) % 16 == 0;
}

uint16_t* CudaBackend::rounded_rows(const LinearParams& params) {
  return reinterpret_cast<uint16_t*>(scratch(params.num_rows * params.in_features * 2));
}

bool CudaBackend::multiply(const LinearParams& params, const uint16_t* rounded) {
  if (uses_mma(params)) {
    mma_linear(rounded, params, stream());
    return true;
  }
  if (!uses_cublaslt(params)) return false;
  if (rounded) return cublaslt_->multiply(rounded, params.in_features, params);
  return cublaslt_->multiply(params.x.data, params.x.stride, params);
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

// The norm writes what the product reads; false if nothing takes bf16 or does this product, and
// then nothing that anybody reads has been written.
bool CudaBackend::norm_rounded(const FusedLinearArgs& args) {
  const LinearParams params = params_of(args.linear);
  if (!takes_rounded(params)) return false;
  check_grid("linear", params.num_rows);
  memory_.make_current();
  uint16_t* rounded = rounded_rows(params);
  cuda::rms_norm({.x = rows_of(args.norm->x),
                  .residual = {nullptr, 0},
                  .weight = args.norm->weight.as<float>(),
                  .out = {nullptr, 0},
                  .num_rows = params.num_rows,
                  .width = params.in_features,
                  .numbers = args.norm->numbers,
                  .rounded = rounded},
                 stream());
  if (!multiply(params, rounded)) return false;
  if (args.gate) do_gated_activation(*args.gate);
  return true;
}

}  // namespace llmserve::cuda
