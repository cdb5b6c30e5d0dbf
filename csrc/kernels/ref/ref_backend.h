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

  void embedding(const EmbeddingArgs& args) override;
  void rms_norm(const RmsNormArgs& args) override;
  void add_rms_norm(const AddRmsNormArgs& args) override;
  void layer_norm(const LayerNormArgs& args) override;
  void add(const AddArgs& args) override;
  void linear(const LinearArgs& args) override;
  void rotary_table(const RotaryTableArgs& args) override;
  void rotary(const RotaryArgs& args) override;
  void store_kv(const StoreKvArgs& args) override;
  void copy_blocks(const CopyBlocksArgs& args) override;
  void paged_attention(const PagedAttentionArgs& args) override;
  void gated_activation(const GatedActivationArgs& args) override;
  void activation(const ActivationArgs& args) override;
  void cap_logits(const CapLogitsArgs& args) override;
  void gather_rows(const GatherRowsArgs& args) override;
  void sample(const SampleArgs& args) override;

 private:
  void quantized_linear(const LinearArgs& args);
  void bf16_linear(const LinearArgs& args);

  const Bf16Products bf16_;
};

std::unique_ptr<Backend> make_ref_backend(const BackendOptions& options);

}  // namespace llmserve
