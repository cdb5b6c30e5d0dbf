// A language model: tokens in, logits out, written once against Backend.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "io/checkpoint.h"
#include "kernels/backend.h"
#include "layers/forward_context.h"
#include "layers/kv_layer_spec.h"
#include "layers/weight_loader.h"
#include "models/model_config.h"

namespace llmserve {

// What a block of the pool holds: one layer of each lane, in order. Layers of a lane are alike.
std::vector<KvLayerSpec> kv_lanes(std::span<const KvLayerSpec> layers);

// Immutable once loaded; forward() may run on one thread at a time, because the backend's pool and
// the arena do.
class Model {
 public:
  explicit Model(ModelConfig config) : config_(std::move(config)) {}
  virtual ~Model() = default;

  const ModelConfig& config() const { return config_; }
  // What the weights take, by group, and the checkpoint's tensors that no layer asked for.
  const WeightReport& weights() const { return weights_; }

  std::span<const KvLayerSpec> kv_layers() const { return config_.kv_layers; }  // [layers]
  int64_t kv_bytes_per_token(DType dtype) const;

  // Runs the step's tokens through all layers, storing keys and values in context.kv_caches and the
  // states of input.wanted_layers in context.layer_states. Returns the final-normed hidden states
  // [T, E] f32, in the arena scope of the caller. Throws NotSupported where a group has ranks, or
  // a sequence an adapter or a state, that the model cannot use.
  virtual Tensor forward(const ForwardContext& context) const = 0;

  // Logits [rows.size(), V] f32 of chosen tokens of `hidden` [T, E], in the arena scope of the
  // caller. `rows` may be any part of input.logit_rows: large sets can go in chunks.
  virtual Tensor compute_logits(const ForwardContext& context, const ConstTensor& hidden,
                                std::span<const int32_t> rows) const = 0;

  // The arena's peak, exactly, of a forward() of max_tokens tokens and one compute_logits() of
  // max_logit_rows rows within the same scope. Fewer of either never need more.
  virtual int64_t workspace_bytes(int64_t max_tokens, int64_t max_logit_rows) const = 0;

 protected:
  // Once all are loaded.
  void set_weights(WeightReport weights) { weights_ = std::move(weights); }

 private:
  ModelConfig config_;
  WeightReport weights_;
};

// A row of architectures.inc, which lists them.
struct ArchitectureRow {
  std::string_view name;        // as in config.json's "architectures"
  std::string_view model_type;  // as in config.json's "model_type"; used where there is no name
  std::string_view summary;
  // Fills in what this family spells or defaults in its own way.
  void (*configure)(const JsonNode& json, ModelConfig& config);
};
std::span<const ArchitectureRow> architecture_registry();
// Throws NotSupported that begins with `where` (file and field) and lists the names.
const ArchitectureRow& find_architecture(std::string_view name, std::string_view where);

// "auto": bf16 if most of the weights are stored so or in quantized blocks, otherwise f32 (f16
// loads as f32, which holds its values exactly), and as config.json says where there are no
// weights. Others: "float32", "bfloat16". Throws InvalidArgument.
DType resolve_dtype(std::string_view requested, const Checkpoint& checkpoint);

// Reads and packs all weights in the given format. The model keeps what it needs of the
// mapping; the checkpoint may go. Throws CorruptFile (absent, mis-shaped or non-finite tensors:
// file, tensor, expected, got), ResourceExhausted, and what check_all_used() throws.
// `packed`: where linear weights come from as far as it has them, and are noted in any case.
// `deferred`: takes those that are to be packed later, which run already.
std::unique_ptr<Model> load_model(const Checkpoint& checkpoint, const ModelConfig& config,
                                  Backend& backend, const WeightFormat& format,
                                  PackedWeights* packed = nullptr,
                                  std::vector<DeferredWeight>* deferred = nullptr);

// Throws NotSupported for a tensor of a GGUF file, which is of one model alone, that nothing uses.
// Other checkpoints may hold what only others use.
void check_all_used(const Checkpoint& checkpoint, const WeightReport& weights);

// What `dtype` and LLM(quantization=...) ask for: "" keeps blocks that the backend runs on, "none"
// dequantizes them, other names are of quant/linear_format.h. Throws NotSupported that lists them.
WeightFormat resolve_weight_format(DType dtype, std::string_view quantization);

// For Backend::reserve_scratch, of steps of at most max_tokens: what follows from the model.
StepShape step_shape(const ModelConfig& config, const WeightReport& weights, int64_t max_tokens);

// The bytes that load_model and a step will take, exactly, from the config and the tensor list
// alone: nothing is loaded. Throws as load_model does, but for non-finite values, and
// InvalidArgument on options below 1.
struct ModelPlan {
  WeightReport weights;
  int64_t kv_bytes_per_token = 0;
  int64_t workspace_bytes = 0;
};
struct ModelPlanOptions {
  WeightFormat format;
  DType kv_cache_dtype = DType::kF32;
  int64_t max_tokens = 2048;        // a step
  int64_t max_logit_rows = 256;     // a step
  PackedWeights* packed = nullptr;  // as load_model takes it
};
ModelPlan plan_model(const Checkpoint& checkpoint, const ModelConfig& config, Backend& backend,
                     const ModelPlanOptions& options);

}  // namespace llmserve
