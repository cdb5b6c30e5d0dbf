// A model of a checkpoint: in which formats, with its weights, or planned without them.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "io/checkpoint.h"
#include "kernels/backend.h"
#include "layers/weight_loader.h"
#include "models/layer_range.h"
#include "models/model.h"

namespace llmserve {

// "auto": bf16 if most of the weights are stored so or in quantized blocks, otherwise f32 (f16
// loads as f32, which holds its values exactly), and as config.json says where there are no
// weights. Others: "float32", "bfloat16". Throws InvalidArgument.
DType resolve_dtype(std::string_view requested, const Checkpoint& checkpoint);

// Reads and packs all weights in the given format. The model keeps what it needs of the
// mapping; the checkpoint may go. Throws CorruptFile (absent, mis-shaped or non-finite tensors:
// file, tensor, expected, got; a file that cannot be read to its end), ResourceExhausted, and what
// check_all_used() throws.
// `packed`: where linear weights come from as far as it has them, and are noted in any case.
// `deferred`: takes those that are to be packed later, which run already.
// `rank`: whose share of the weights it is. `layers`: of the stage that it is a rank of.
std::unique_ptr<Model> load_model(const Checkpoint& checkpoint, const ModelConfig& config,
                                  Backend& backend, const WeightFormat& format,
                                  PackedWeights* packed = nullptr,
                                  std::vector<DeferredWeight>* deferred = nullptr,
                                  const TensorRank& rank = {}, const LayerRange& layers = {});

// Which tensors no layer uses; empty: all are used, or named by models/skipped_tensors.cpp.
std::string describe_unused(const Checkpoint& checkpoint, const WeightReport& weights);
// Throws NotSupported for them, unless another config.json was given: then it is another model.
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
  TensorRank rank;
  LayerRange layers;
};
ModelPlan plan_model(const Checkpoint& checkpoint, const ModelConfig& config, Backend& backend,
                     const ModelPlanOptions& options);

}  // namespace llmserve
