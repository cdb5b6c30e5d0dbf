// Products by wgmma (wgmma_product.cu), from the host: maps, working memory, and whether this GPU's
// results can be believed.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "core/buffer.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/linear/wgmma_product.h"
#include "kernels/cuda/tensor_maps.h"

namespace llmserve::cuda {

class WgmmaLinear {
 public:
  // Taken for good.
  static constexpr int64_t kWorkingBytes = kWgmmaPartialBytes + kWgmmaArrivals * 4;

  // Null, and the reason in `problem`, where the device, the build or the driver has no such
  // products. `major` and `minor` are the compute capability.
  static std::unique_ptr<WgmmaLinear> open(DeviceMemory& memory, int major, int minor, int num_sms,
                                           std::string& problem);

  // What is wrong, or nothing: whether small products have the results of mma_linear, and the same
  // bits in every form. Runs them and waits the first time, which must not be within a capture.
  const std::string& find_problem();

  // What has a product by wgmma: a bf16 weight whose K is a multiple of 8 and which begins at a
  // multiple of 16 bytes. Of the weight alone: another product of the same weight has other bits.
  static bool can_multiply(const LinearParams& params);
  // Whether it can be gated at the end.
  static bool can_gate(const LinearParams& params) { return params.out_features % 16 == 0; }

  // x [M, K] bf16, contiguous, from a multiple of 16 bytes on, in place of params.x.
  void multiply(const uint16_t* x, const LinearParams& params) const {
    run(x, params, nullptr, nullptr, wgmma_form_of(params));
  }
  // out [M, N / 2] is the gate's; or `rounded`, its values as bf16, contiguous, if not null. With
  // the bits of the product and the gate one after the other.
  void multiply_gated(const uint16_t* x, const LinearParams& params, Activation activation,
                      uint16_t* rounded = nullptr) const {
    run(x, params, &activation, rounded, wgmma_form_of(params));
  }
  // In a form of those that wgmma_form() gives, for trials.
  void run(const uint16_t* x, const LinearParams& params, const Activation* gate, uint16_t* rounded,
           const WgmmaForm& form) const;

 private:
  WgmmaLinear(DeviceMemory& memory, const TensorMaps& maps, int num_sms);
  static WgmmaForm wgmma_form_of(const LinearParams& params) {
    return wgmma_form(params.num_rows, params.out_features, params.in_features);
  }

  DeviceMemory& memory_;
  const TensorMaps maps_;
  const int num_sms_;
  Buffer working_;
  std::optional<std::string> problem_;  // none: not tried yet
};

}  // namespace llmserve::cuda
