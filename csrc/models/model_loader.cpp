#include "models/model_loader.h"

#include "core/error.h"
#include "io/json.h"
#include "models/decoder.h"

namespace llmserve {

DType resolve_dtype(std::string_view requested, const Checkpoint& checkpoint) {
  if (requested == name(DType::kF32)) return DType::kF32;
  if (requested == name(DType::kBF16)) return DType::kBF16;
  if (requested != "auto")
    throw InvalidArgument(
        concat("dtype: expected auto, float32 or bfloat16, got \"", requested, "\""));
  if (!checkpoint.has_tensors()) {
    const JsonNode json(checkpoint.config());
    const JsonNode stored = json["dtype"].is_null() ? json["torch_dtype"] : json["dtype"];
    return !stored.is_null() && stored.as_string() == name(DType::kBF16) ? DType::kBF16
                                                                         : DType::kF32;
  }
  int64_t bf16_bytes = 0;
  int64_t all_bytes = 0;
  for (const TensorEntry& entry : checkpoint.tensors()) {
    all_bytes += entry.num_bytes;
    const bool is_quantized = checkpoint.storage(entry).blocks ||
                              (checkpoint.quantization() && size_bytes(entry.dtype) == 1) ||
                              (checkpoint.quantization() && entry.dtype == DType::kI32);
    if (entry.dtype == DType::kBF16 || is_quantized) bf16_bytes += entry.num_bytes;
  }
  return 2 * bf16_bytes > all_bytes ? DType::kBF16 : DType::kF32;
}

std::unique_ptr<Model> load_model(const Checkpoint& checkpoint, const ModelConfig& config,
                                  Backend& backend, const WeightFormat& format,
                                  PackedWeights* packed, std::vector<DeferredWeight>* deferred,
                                  const TensorRank& rank, const LayerRange& layers) {
  WeightLoader weights(checkpoint, backend, format,
                       {.load = true, .packed = packed, .deferred = deferred}, rank);
  std::unique_ptr<Model> model = build_decoder(config, weights, layers);
  for (const auto& file : checkpoint.files()) file->read_state()->check();
  if (layers.is_whole()) {
    check_all_used(checkpoint, model->weights());
  } else {  // what a stage does not use another one may
    check_all_used(checkpoint, plan_model(checkpoint, config, backend, {.format = format}).weights);
  }
  return model;
}

std::string describe_unused(const Checkpoint& checkpoint, const WeightReport& weights) {
  if (weights.unused_tensors.empty()) return "";
  const size_t num_others = weights.unused_tensors.size() - 1;
  return concat(checkpoint.path(), ": tensor \"", weights.unused_tensors[0], "\"",
                num_others == 0 ? "" : concat(" and ", num_others, " others"),
                ": no layer of this model uses ", num_others == 0 ? "it" : "them");
}

void check_all_used(const Checkpoint& checkpoint, const WeightReport& weights) {
  if (weights.unused_tensors.empty() || !checkpoint.config_text().empty()) return;
  throw NotSupported(concat(
      describe_unused(checkpoint, weights),
      ", so that it would be another model than the file's; the configuration may be of a smaller "
      "model, or the architecture not the file's"));
}

WeightFormat resolve_weight_format(DType dtype, std::string_view quantization) {
  if (quantization.empty()) return {.dtype = dtype, .keeps_blocks = true};
  if (quantization == "none") return {.dtype = dtype};
  return {.dtype = dtype, .integers = &find_linear_format(quantization)};
}

StepShape step_shape(const ModelConfig& config, const WeightReport& weights, int64_t max_tokens) {
  const CacheGroupSpec& rows = config.cache_groups.front();
  return {.max_tokens = max_tokens,
          .max_in_features = weights.max_in_features,
          .num_kv_heads = rows.num_kv_heads,
          .group = config.num_heads / rows.num_kv_heads,
          .key_dim = rows.key_dim,
          .value_dim = rows.value_dim,
          .has_values_in_keys = rows.values_in_keys,
          .vocab_size = config.vocab_size,
          .activation_bytes = weights.activation_bytes,
          .grouped = weights.grouped};
}

ModelPlan plan_model(const Checkpoint& checkpoint, const ModelConfig& config, Backend& backend,
                     const ModelPlanOptions& options) {
  if (options.max_tokens < 1 || options.max_logit_rows < 1)
    throw InvalidArgument(concat("max_tokens and max_logit_rows: expected at least 1, got ",
                                 options.max_tokens, " and ", options.max_logit_rows));
  WeightLoader weights(checkpoint, backend, options.format, {.packed = options.packed},
                       options.rank);
  const std::unique_ptr<Model> model = build_decoder(config, weights, options.layers);
  return {.weights = model->weights(),
          .kv_bytes_per_token = model->kv_bytes_per_token(options.kv_cache_dtype),
          .workspace_bytes = model->workspace_bytes(options.max_tokens, options.max_logit_rows)};
}

}  // namespace llmserve
