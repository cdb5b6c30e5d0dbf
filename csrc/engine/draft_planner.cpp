#include "engine/draft_planner.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/error.h"
#include "engine/head_worker.h"
#include "engine/worker_plan.h"
#include "io/checkpoint.h"
#include "io/head_checkpoint.h"
#include "layers/weight_loader.h"
#include "models/config_reader.h"
#include "models/draft_heads/registry.h"
#include "models/model_loader.h"
#include "speculation/registry.h"

namespace llmserve {
namespace {

Checkpoint open_draft(const std::string& model) {
  return model.ends_with(".json") ? open_config(model) : open_checkpoint(model);
}

Checkpoint open_head(const std::string& model) {
  return model.ends_with(".json") ? open_config(model) : open_head_checkpoint(model);
}

// What is the target's is the draft's, unless `speculation` says otherwise.
ConfigRequest draft_request(const ConfigRequest& request, const EngineConfig& target_config,
                            const std::string& model) {
  const SpeculationConfig& speculation = target_config.speculation;
  ConfigRequest draft{.settings = {.device = target_config.device,
                                   .quantization = speculation.draft_quantization,
                                   .seed = target_config.seed,
                                   .enforce_eager = target_config.enforce_eager,
                                   .defer_packing = target_config.defer_packing},
                      .model = model,
                      .device = target_config.device,
                      .kv_cache_dtype = request.kv_cache_dtype,
                      .max_num_batched_tokens = target_config.scheduler.max_num_batched_tokens,
                      .max_num_seqs = target_config.scheduler.max_num_seqs,
                      .num_threads = thread_share(target_config, 0).count};
  if (!speculation.draft_dtype.empty()) draft.dtype = speculation.draft_dtype;
  draft.settings.cache.block_size = target_config.cache.block_size;
  draft.settings.cache.enable_prefix_caching = target_config.cache.enable_prefix_caching;
  return draft;
}

EngineConfig resolve_draft(const ConfigRequest& draft, const Checkpoint& checkpoint,
                           const ModelConfig& model, const EngineConfig& target_config) {
  EngineConfig config = resolve_settings(draft, checkpoint, model);
  config.scheduler.max_model_len =
      std::min(config.scheduler.max_model_len, target_config.scheduler.max_model_len);
  config.cache.groups = model.cache_groups;
  check_kv_rows(config.kv_cache_dtype, config.cache.groups.front());
  return config;
}

void plan_model_draft(const ConfigRequest& request, int64_t vocab_size,
                      const EngineConfig& target_config, PlannedDraft& plan) {
  const std::string& path = target_config.speculation.model;
  const Checkpoint checkpoint = open_draft(path);
  const ModelConfig model = read_model_config(checkpoint.config(), 0);
  if (model.vocab_size != vocab_size && !target_config.speculation.has_heterogeneous_vocab)
    throw InvalidArgument(concat("speculative_config: model ", path, " has a vocabulary of ",
                                 model.vocab_size, " tokens, and the ", "target one of ",
                                 vocab_size,
                                 "; a draft model has the target's tokenizer, or "
                                 "use_heterogeneous_vocab maps its tokens by their text"));
  if (state_bytes(model.cache_groups) > 0)
    throw NotSupported(concat("speculative_config: model ", path,
                              " has layers with a state of fixed size, which cannot take guesses "
                              "back; use a model of attention layers"));
  EngineConfig config =
      resolve_draft(draft_request(request, target_config, path), checkpoint, model, target_config);
  const std::unique_ptr<Backend> backend = make_backend(config.device, {.num_threads = 1});
  ModelPlan sizes = plan_model(checkpoint, model, *backend,
                               {.format = resolve_weight_format(config.dtype, config.quantization),
                                .max_tokens = config.scheduler.max_num_batched_tokens,
                                .max_logit_rows = kMaxLogitRowsAtOnce});
  plan.weights = std::move(sizes.weights);
  plan.workspace_bytes = sizes.workspace_bytes + layer_state_bytes(model, config);
  plan.scratch_bytes = {
      backend->scratch_bytes(largest_step(model, plan.weights, config), config.num_threads)};
  plan.architecture = model.architecture;
  const std::span<const CacheGroupSpec> rows = row_groups(config.cache.groups);
  plan.groups.assign(rows.begin(), rows.end());
  plan.config = std::make_shared<const EngineConfig>(std::move(config));
}

void add_head_rank(const HeadConfig& head, const Checkpoint& checkpoint, const EngineConfig& config,
                   Backend& backend, int rank, PlannedDraft& plan) {
  WeightLoader weights(checkpoint, backend,
                       resolve_weight_format(config.dtype, config.quantization), {},
                       tensor_rank(config, rank));
  const std::unique_ptr<DraftHead> planned = make_draft_head(head, weights);
  plan.workspace_bytes += head_workspace_bytes(*planned, config, rank);
  plan.scratch_bytes.back() = backend.scratch_bytes(
      largest_step(head.layer, planned->weights(), config), thread_share(config, rank).count);
  const std::vector<CacheGroupSpec> groups = head_cache_groups(head, tensor_rank(config, rank));
  if (rank == config.parallel.first_rank()) {
    plan.weights = planned->weights();
    plan.groups = groups;
    return;
  }
  add_bytes(planned->weights(), plan.weights);
  for (size_t i = 0; i < groups.size(); ++i) plan.groups[i].num_kv_heads += groups[i].num_kv_heads;
}

void plan_head(const ConfigRequest& request, const Checkpoint& checkpoint,
               const ModelConfig& target, const EngineConfig& target_config, PlannedDraft& plan) {
  const DrafterKind& kind = find_drafter(target_config.speculation.method);
  if (!target_config.speculation.is_exact())
    throw NotSupported(concat("speculative_config: rejection_sample_method 'rejection' is not ",
                              "supported with method \"", kind.name, "\"; leave it at 'exact'"));
  if (target_config.speculation.has_heterogeneous_vocab)
    throw NotSupported(concat("speculative_config: use_heterogeneous_vocab is not supported with ",
                              "method \"", kind.name, "\"; a head has the target's tokens"));
  if (state_bytes(target.cache_groups) > 0)
    throw NotSupported(concat("speculative_config: method \"", kind.name,
                              "\": the target has layers with a state of fixed size, which cannot "
                              "take guesses back"));
  HeadConfig head = read_head_config(head_kind(kind.name), checkpoint, target);
  if (head.num_layers() > 1 && target_config.speculation.has_trees())
    throw NotSupported(concat("speculative_config: speculative_eagle_topk and ",
                              "speculative_token_tree are not supported with the ",
                              head.num_layers(), " layers of this model, of which each guesses a ",
                              "place; leave them out"));
  const bool is_own = kind.source == DraftSource::kOwn;
  ConfigRequest draft = draft_request(
      request, target_config, is_own ? target_config.model_path : target_config.speculation.model);
  if (is_own && draft.settings.quantization.empty())
    draft.settings.quantization = target_config.quantization;
  if (is_own && target_config.speculation.draft_dtype.empty())
    draft.dtype = name(target_config.dtype);
  EngineConfig config = resolve_draft(draft, checkpoint, head.layer, target_config);
  config.speculation = target_config.speculation;
  config.parallel = target_config.parallel;
  config.parallel.decode_context = 1;  // each rank of a head keeps its own
  config.num_threads = target_config.num_threads;
  if (!head.has_cache()) config.cache.groups.clear();
  plan.max_wanted_layers = static_cast<int32_t>(
      std::set<int32_t>(head.target_layers.begin(), head.target_layers.end()).size());
  plan.architecture = head.architecture;
  const std::unique_ptr<Backend> backend = make_backend(config.device, {.num_threads = 1});
  plan.has_late_embedding = config.parallel.pipeline > 1 && head.has_cache() && !head.has_embedding;
  // The last stage has it.
  const int32_t num_local = config.parallel.num_local_last_ranks();
  // One for all ranks of a host, and one on each device.
  const bool is_shared = backend->memory().is_host();
  plan.workspace_bytes =
      kept_state_bytes(head, config) * (is_shared && num_local > 0 ? 1 : num_local);
  const int first = config.parallel.first_rank();
  for (int rank = 0; rank < config.parallel.num_ranks(); ++rank) {
    plan.scratch_bytes.push_back(0);
    if (rank >= first && rank < first + num_local)
      add_head_rank(head, checkpoint, config, *backend, rank, plan);
  }
  plan.config = std::make_shared<const EngineConfig>(std::move(config));
}

}  // namespace

PlannedDraft plan_draft(const ConfigRequest& request, const Checkpoint& target_checkpoint,
                        const ModelConfig& target, const EngineConfig& config) {
  PlannedDraft plan;
  const SpeculationConfig& speculation = config.speculation;
  if (!speculation.is_on()) return plan;
  const DrafterKind& kind = find_drafter(speculation.method);
  if (!kind.has_weights()) return plan;
  if (kind.source == DraftSource::kModel) {
    plan_model_draft(request, target.vocab_size, config, plan);
  } else if (kind.source == DraftSource::kHead) {
    plan_head(request, open_head(speculation.model), target, config, plan);
  } else {
    plan_head(request, target_checkpoint, target, config, plan);
  }
  return plan;
}

}  // namespace llmserve
