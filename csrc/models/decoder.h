// The skeleton that most decoders share: embedding, layers of attention and gated MLP with norms
// before, a final norm, a head. An architecture's file says how its config maps to it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers/attention.h"
#include "layers/embedding.h"
#include "layers/gated_mlp.h"
#include "layers/lm_head.h"
#include "layers/rms_norm.h"
#include "layers/rotary.h"
#include "models/model.h"

namespace llmserve {

class DecoderLayer {
 public:
  // Weights below "<prefix>", e.g. "model.layers.0".
  DecoderLayer(WeightLoader& weights, const std::string& prefix, const ModelConfig& config,
               int32_t window);

  // hidden [T, E] += attention(norm(hidden)); hidden += mlp(norm(hidden)).
  void forward(const ForwardContext& context, const ConstTensor& cos_sin, const PagedKvCache& cache,
               const Tensor& hidden) const;
  int64_t workspace_bytes(int64_t num_tokens) const;

 private:
  int64_t hidden_size_;
  RmsNorm attention_norm_;
  Attention attention_;
  RmsNorm mlp_norm_;
  GatedMlp mlp_;
};

class Decoder final : public Model {
 public:
  // The weights of one decoder, in the order that they are loaded.
  struct Parts {
    Embedding embedding;
    std::vector<DecoderLayer> layers;
    RmsNorm final_norm;
    LmHead lm_head;
    Rotary rotary;
  };
  Decoder(const ModelConfig& config, Parts parts, WeightReport weights);

  std::span<const KvLayerSpec> kv_layers() const override { return kv_layers_; }
  Tensor forward(const ForwardContext& context) const override;
  Tensor compute_logits(const ForwardContext& context, const ConstTensor& hidden,
                        std::span<const int32_t> rows) const override;
  int64_t workspace_bytes(int64_t max_tokens, int64_t max_logit_rows) const override;

 private:
  Parts parts_;
  std::vector<KvLayerSpec> kv_layers_;
};

// Loads a decoder whose tensors have the names of Llama's. What the config does not ask for
// (biases, head norms, windows) is not there.
std::unique_ptr<Model> build_decoder(const ModelConfig& config, WeightLoader& weights);

}  // namespace llmserve
