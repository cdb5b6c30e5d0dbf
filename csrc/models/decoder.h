// The skeleton that most decoders share: embedding, layers of attention and feed-forward with norms
// before or after them, a final norm, a head. ModelConfig says what of it a model has, and of which
// kind each layer's two parts are (layer_kinds.h). An architecture's file maps its config to that.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layers/attention_layer.h"
#include "layers/embedding.h"
#include "layers/feed_forward.h"
#include "layers/lm_head.h"
#include "layers/norm.h"
#include "layers/rotary.h"
#include "models/layer_range.h"
#include "models/model.h"

namespace llmserve {

class DecoderLayer {
 public:
  DecoderLayer(WeightLoader& weights, const ModelConfig& config, int64_t layer_idx);

  // hidden [T, E] += branch(attention); hidden += branch(feed-forward), where a branch is norm, the
  // layer, a second norm and the residual scale, as far as the model has them. In a parallel block
  // both read the hidden states that came in.
  void forward(const ForwardContext& context, const RotaryTables& angles, const PagedKvCache& cache,
               const Tensor& hidden) const;
  int64_t workspace_bytes(int64_t num_tokens) const;
  const FeedForward& feed_forward() const { return *feed_forward_; }

 private:
  // What a branch reads: norm(hidden) in `normed`, or hidden itself without a norm.
  LinearInput before(const ForwardContext& context, const std::optional<Norm>& norm,
                     const Tensor& hidden, const Tensor& normed) const;
  // hidden += scale * norm(what `run` writes), without a detour where there is nothing to do.
  template <class Run>
  void add_branch(const ForwardContext& context, const std::optional<Norm>& post_norm,
                  const Tensor& hidden, const Run& run) const;
  bool has_detour(const std::optional<Norm>& post_norm) const {
    return post_norm || residual_scale_ != 1.0f;
  }

  int64_t hidden_size_;
  bool is_parallel_;
  float residual_scale_;
  std::optional<Norm> attention_norm_;
  std::unique_ptr<AttentionLayer> attention_;
  std::optional<Norm> attention_post_norm_;
  std::optional<Norm> mlp_norm_;
  std::unique_ptr<FeedForward> feed_forward_;
  std::optional<Norm> mlp_post_norm_;
};

// Of a stage of a pipeline, its layers alone. It gets the hidden states of the stage before from
// context.groups.pp, whose ranks are the stages, and sends its own to the next. forward() of a
// stage that is not the last returns what it has sent. States that are wanted of a layer go on
// behind them, so that the last stage has those of all layers.
class Decoder final : public Model {
 public:
  // Its report names no tensor as unused where other stages may use it.
  Decoder(const ModelConfig& config, WeightLoader& weights, const LayerRange& range = {});

  Tensor forward(const ForwardContext& context) const override;
  // Of the first stage, and of one that LayerRange says it of.
  void embed(const ForwardContext& context, const Tensor& out) const override {
    embedding_->forward(context, out);
  }
  // Of the last stage.
  Tensor compute_logits(const ForwardContext& context, const ConstTensor& hidden,
                        std::span<const int32_t> rows) const override;
  int64_t workspace_bytes(int64_t max_tokens, int64_t max_logit_rows) const override;
  std::span<const DecoderLayer> layers() const { return layers_; }  // of its stage

 private:
  // Copies what the layer is about to read, what leaves the last one, or the final norm, if it is
  // wanted.
  void keep_wanted(const ForwardContext& context, int64_t layer_idx, const Tensor& hidden) const;
  // Of the stage before; to the one behind.
  void receive(const ForwardContext& context, const Tensor& hidden) const;
  void send(const ForwardContext& context, const Tensor& hidden) const;

  // The members that own weights stand in the order that these are loaded in.
  const LayerRange range_;
  std::optional<Embedding> embedding_;          // of a stage that embeds tokens
  std::optional<PositionEmbedding> positions_;  // of the first
  std::vector<DecoderLayer> layers_;
  std::optional<Norm> final_norm_;  // of the last stage, like the head
  std::optional<LmHead> lm_head_;
  std::vector<Rotary> rotaries_;  // [config.ropes]
};

std::unique_ptr<Model> build_decoder(const ModelConfig& config, WeightLoader& weights,
                                     const LayerRange& range = {});

}  // namespace llmserve
