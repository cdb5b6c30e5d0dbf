// The executable specification: plain loops in f32 over row-major weights, one thread. Every other
// backend is tested against it.
#pragma once

#include "kernels/backend.h"
#include "kernels/ref/bf16_products.h"

namespace llmserve {

class RefBackend final : public Backend {
 public:
  explicit RefBackend(const BackendOptions& options) : bf16_(bf16_products(options.isa)) {}

  std::string_view name() const override { return "ref"; }
  std::string description() const override { return "ref, scalar float32"; }

  LinearWeight pack_linear(std::span<const ConstTensor> parts, DType dtype) override;
  int64_t packed_bytes(int64_t out_features, int64_t in_features, DType dtype) const override;
  // Every format, as row-major [N, K] bytes, then scales and minima [N, groups].
  bool can_run(const LinearFormat&) const override { return true; }
  LinearWeight pack_quantized(const LinearFormat& format, int64_t out_features, int64_t in_features,
                              const QuantizedRowReader& read) override;
  int64_t packed_bytes(int64_t out_features, int64_t in_features,
                       const LinearFormat& format) const override;
  int64_t first_non_finite(const ConstTensor& tensor) override;

 private:
#define LLMSERVE_OP(name, Args) void do_##name(const Args& args) override;
#define LLMSERVE_FUSED_OP(name, Args)
#include "kernels/op_list.inc"
  void quantized_linear(const LinearArgs& args);
  void bf16_linear(const LinearArgs& args);

  const Bf16Products bf16_;
};

std::unique_ptr<Backend> make_ref_backend(const BackendOptions& options);

}  // namespace llmserve
