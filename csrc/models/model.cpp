#include "models/model.h"

#include "core/error.h"

namespace llmserve {

int64_t Model::kv_bytes_per_token(DType dtype) const {
  int64_t bytes = 0;
  for (const KvLayerSpec& layer : kv_layers()) bytes += layer.bytes_per_token(dtype);
  return bytes;
}

DType resolve_dtype(std::string_view requested, const Checkpoint& checkpoint) {
  if (requested == name(DType::kF32)) return DType::kF32;
  if (requested == name(DType::kBF16)) return DType::kBF16;
  if (requested != "auto")
    throw InvalidArgument(
        concat("dtype: expected auto, float32 or bfloat16, got \"", requested, "\""));
  int64_t bf16_bytes = 0;
  int64_t all_bytes = 0;
  for (const TensorEntry& entry : checkpoint.tensors()) {
    all_bytes += entry.num_bytes;
    if (entry.dtype == DType::kBF16) bf16_bytes += entry.num_bytes;
  }
  return 2 * bf16_bytes > all_bytes ? DType::kBF16 : DType::kF32;
}

std::unique_ptr<Model> load_model(const Checkpoint& checkpoint, const ModelConfig& config,
                                  Backend& backend, DType dtype) {
  WeightLoader weights(checkpoint, backend, dtype, /*load=*/true);
  return find_architecture(config.architecture, "ModelConfig").build(config, weights);
}

ModelPlan plan_model(const Checkpoint& checkpoint, const ModelConfig& config, Backend& backend,
                     const ModelPlanOptions& options) {
  if (options.max_tokens < 1 || options.max_logit_rows < 1)
    throw InvalidArgument(concat("max_tokens and max_logit_rows: expected at least 1, got ",
                                 options.max_tokens, " and ", options.max_logit_rows));
  WeightLoader weights(checkpoint, backend, options.dtype, /*load=*/false);
  const std::unique_ptr<Model> model =
      find_architecture(config.architecture, "ModelConfig").build(config, weights);
  return {.weights = model->weights(),
          .kv_bytes_per_token = model->kv_bytes_per_token(options.kv_cache_dtype),
          .workspace_bytes = model->workspace_bytes(options.max_tokens, options.max_logit_rows)};
}

}  // namespace llmserve
