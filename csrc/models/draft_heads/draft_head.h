// Heads that draft for a model: from its hidden states they guess its next tokens. Written once
// against Backend, as the models are.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "io/checkpoint.h"
#include "layers/forward_context.h"
#include "layers/weight_report.h"
#include "models/model.h"
#include "models/model_config.h"

namespace llmserve {

// What is guessed from, and how a guess becomes the next one's.
enum class HeadKind : uint8_t {
  kEagle3,  // states of several layers, then its own output: Li et al. 2025
  kEagle,   // the final hidden state, then its own guess of it: Li et al. 2024
  kMedusa,  // the final hidden state, and a head for each place: Cai et al. 2024
  kMtp,     // a layer of the target's own file: DeepSeek-AI 2024 (DeepSeek-V3), section 2.2
};

struct HeadConfig {
  HeadKind kind = HeadKind::kEagle3;
  std::string architecture;  // for people
  // Its one layer, with sizes as those of a decoder.
  ModelConfig layer;
  int64_t layer_idx = 0;  // of `layer`: which one it is
  int64_t target_vocab_size = 0;
  int64_t target_hidden_size = 0;  // E of the target
  // Whose hidden states it reads, as ModelInput::wanted_layers has them but in any order: one after
  // another they are the states of a token.
  std::vector<int32_t> target_layers;
  int64_t vocab_size = 0;  // D, of its logits
  // [D] the target's token of each of its own; empty: they are the same.
  std::vector<int32_t> target_tokens;
  std::string prefix;  // of its layer's tensors
  // Of EAGLE and layers of the target's own file: names of what is beside the layer; empty: none.
  struct Names {
    std::string fc = "model.fc";
    std::string embedding_norm;
    std::string feature_norm;
    std::string final_norm;
    std::string embedding = "model.embed_tokens";
    std::string lm_head;
  };
  Names names;
  bool has_embedding = false;
  bool has_lm_head = false;
  bool has_fc_bias = false;
  // Of EAGLE-3: a norm of all states before fc, one of each, what the layer adds to, and what the
  // next guess goes on from.
  bool has_input_norm = false;
  bool has_fc_norms = false;
  bool has_normed_residual = false;
  bool has_normed_output = false;
  // Of Medusa.
  int32_t num_heads = 0;
  int32_t num_blocks = 0;     // before a head's matrix
  bool is_converted = false;  // tensors as blocks.i.layers.j and lm_heads.i

  // Of layers of the target's own file: one a place behind the first, which drafts the first.
  std::vector<HeadConfig> later;

  int64_t num_layers() const { return 1 + std::ssize(later); }
  int64_t hidden_size() const { return layer.hidden_size; }  // H
  int64_t state_size() const {                               // of a token's states
    return std::ssize(target_layers) * target_hidden_size;
  }
  bool has_cache() const { return kind != HeadKind::kMedusa; }
  bool has_state_layer() const { return kind == HeadKind::kEagle3; }
  // Guesses in a row at most; 0: no bound.
  int32_t max_guesses() const {
    return later.empty() ? num_heads : static_cast<int32_t>(num_layers());
  }
};

// "eagle3", "eagle", "medusa", "mtp". Throws NotSupported.
HeadKind head_kind(std::string_view method);

// Of a head's checkpoint (of kMtp, the target's), for a target. Throws InvalidArgument for a head
// of another target, NotSupported, CorruptFile: each names the field or the tensor.
HeadConfig read_head_config(HeadKind kind, const Checkpoint& checkpoint, const ModelConfig& target);

// Immutable once loaded, like a Model. A row of it stands for a token of the target that has run,
// and reads the token behind it; its positions are those of the tokens that have run.
class DraftHead {
 public:
  explicit DraftHead(HeadConfig config) : config_(std::move(config)) {}
  virtual ~DraftHead() = default;

  const HeadConfig& config() const { return config_; }
  const WeightReport& weights() const { return weights_; }

  // features [T, H] = what rows read of the target's states [T, state_size], where a layer makes it
  // of them (HeadConfig::has_state_layer); otherwise they are the features.
  virtual void read_states(const ForwardContext& /*context*/, const Tensor& /*states*/,
                           const Tensor& /*features*/) const {}
  // features [T, H], of the target's states or of what this wrote for the row before, become what
  // logits are of, and what the rows behind read. Keys and values go to the cache of the layer that
  // drafts at `place`, 0 being the first.
  virtual void forward(const ForwardContext& context, const Model& target, const Tensor& features,
                       int32_t place) const = 0;
  // Logits [rows.size(), D] of the guess at `place`, in the caller's scope.
  virtual Tensor compute_logits(const ForwardContext& context, const Model& target,
                                const ConstTensor& features, std::span<const int32_t> rows,
                                int32_t place) const = 0;
  // The arena's peak, exactly or more, of the three in turn, states and features not included.
  virtual int64_t workspace_bytes(int64_t max_rows, int64_t max_logit_rows) const = 0;

  // Rows [R, E] of f32, each contiguous.
  static void copy_rows(const ForwardContext& context, const ConstTensor& from, const Tensor& to);
  // Of the target's or an own head of V rows.
  static int64_t logit_bytes(int64_t vocab_size, int64_t hidden_size, int64_t num_rows);

 protected:
  void set_weights(WeightReport weights) { weights_ = std::move(weights); }

 private:
  HeadConfig config_;
  WeightReport weights_;
};

}  // namespace llmserve
