#include "engine/worker_plan.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "engine/batch_builder.h"
#include "io/quantization_files.h"
#include "layers/context_cut.h"
#include "models/layer_kinds.h"
#include "models/model_loader.h"

namespace llmserve {
namespace {

// Bytes of a layer's weights that a decoded token reads.
int64_t bytes_read(const WeightReport& weights) {
  const auto group = [&](WeightGroup kind) {
    return weights.group_bytes[static_cast<size_t>(kind)];
  };
  const int64_t experts = group(WeightGroup::kExperts);
  return group(WeightGroup::kAttention) + group(WeightGroup::kMlp) + group(WeightGroup::kNorm) +
         (experts == 0 ? 0 : experts * weights.experts_per_token / weights.num_experts);
}

// Cuts [costs] into runs of one or more, of which the largest costs least: best[k][n] is that of
// the first n in k + 1 runs.
std::vector<size_t> cut_evenly(const std::vector<int64_t>& costs, size_t num_runs) {
  const size_t count = costs.size();
  std::vector<int64_t> sums(count + 1, 0);
  for (size_t i = 0; i < count; ++i) sums[i + 1] = sums[i] + costs[i];
  std::vector<std::vector<int64_t>> best(num_runs, sums);
  std::vector<std::vector<size_t>> cuts(num_runs, std::vector<size_t>(count + 1, 0));
  for (size_t k = 1; k < num_runs; ++k) {
    for (size_t n = k + 1; n <= count; ++n) {
      best[k][n] = std::numeric_limits<int64_t>::max();
      for (size_t cut = k; cut < n; ++cut) {
        const int64_t cost = std::max(best[k - 1][cut], sums[n] - sums[cut]);
        if (cost < best[k][n]) {
          best[k][n] = cost;
          cuts[k][n] = cut;
        }
      }
    }
  }
  std::vector<size_t> ends(num_runs, count);
  for (size_t k = num_runs - 1; k > 0; --k) ends[k - 1] = cuts[k][ends[k]];
  return ends;
}

}  // namespace

std::vector<LayerRange> split_layers(const EngineConfig& config, const Checkpoint& checkpoint,
                                     const ModelConfig& model, Backend& backend) {
  const int64_t num_stages = config.parallel.pipeline;
  if (num_stages == 1) return {LayerRange()};
  if (num_stages > model.num_layers)
    throw InvalidArgument(concat("pipeline_parallel_size=", num_stages, ": the model has ",
                                 model.num_layers, " layers, and each stage one or more"));
  const auto plan = [&](int64_t begin, int64_t end) {
    return plan_model(checkpoint, model, backend,
                      {.format = resolve_weight_format(config.dtype, config.quantization),
                       .layers = {.begin = begin, .end = end}})
        .weights;
  };
  std::vector<int64_t> costs;
  for (int64_t i = 0; i < model.num_layers; ++i) costs.push_back(bytes_read(plan(i, i + 1)));
  const WeightReport behind = plan(model.num_layers, LayerRange::kLast);
  costs.back() += behind.group_bytes[static_cast<size_t>(WeightGroup::kLmHead)];
  std::vector<LayerRange> stages;
  int64_t begin = 0;
  for (const size_t end : cut_evenly(costs, static_cast<size_t>(num_stages))) {
    stages.push_back({.begin = begin, .end = static_cast<int64_t>(end)});
    begin = static_cast<int64_t>(end);
  }
  stages.back().end = LayerRange::kLast;
  stages.back().has_embedding = config.has_late_embedding;
  return stages;
}

CacheGroupSpec RankCache::lanes() const {
  CacheGroupSpec rows = groups.front();
  rows.num_layers = num_lanes(groups);
  return rows;
}

RankCache rank_cache(const ModelConfig& model, const TensorRank& rank, const LayerRange& layers) {
  RankCache cache{.groups = rank_cache_groups(model, rank), .places = model.kv_places};
  if (layers.is_whole()) return cache;
  for (CacheGroupSpec& group : cache.groups) group.num_layers = 0;
  for (int64_t i = 0; i < model.num_layers; ++i) {
    KvPlace& place = cache.places[static_cast<size_t>(i)];
    if (i < layers.begin || i >= layers.end) {
      place = KvPlace();
      continue;
    }
    if (place.group >= 0) place.lane = cache.groups[static_cast<size_t>(place.group)].num_layers++;
    if (place.state_group >= 0)
      place.state_lane = cache.groups[static_cast<size_t>(place.state_group)].num_layers++;
  }
  return cache;
}

TensorRank tensor_rank(const EngineConfig& config, int rank) {
  return {
      .rank = rank % config.parallel.tensor,
      .size = config.parallel.tensor,
      .has_whole_experts = config.parallel.has_whole_experts,
      .context_size = config.parallel.decode_context,
      .cut = static_cast<LinearCut>(std::ranges::find(kTensorParallelCuts, config.parallel.cut) -
                                    kTensorParallelCuts.begin())};
}

void check_context_ranks(const ModelConfig& model, const ParallelConfig& parallel) {
  if (parallel.decode_context == 1) return;
  const auto refuse = [&](const std::string& reason) {
    throw NotSupported(
        concat("decode_context_parallel_size=", parallel.decode_context, ": ", reason));
  };
  if (row_groups(model.cache_groups).empty()) refuse("the model keeps no keys; leave it at 1");
  const auto are_shared = [&](int32_t size) {
    return keeps_one_kv_head({.size = parallel.tensor, .context_size = size}, model.num_heads,
                             model.num_kv_heads);
  };
  const bool cuts_kv_heads = std::ranges::any_of(
      model.layers, [](const LayerTraits& layer) { return layer.attention->cuts_kv_heads; });
  if (!cuts_kv_heads || are_shared(parallel.decode_context)) return;
  int32_t most = 1;
  for (int32_t size = 2; size < parallel.decode_context; ++size)
    if (parallel.tensor % size == 0 && are_shared(size)) most = size;
  refuse(concat("the model has ", model.num_kv_heads, " KV heads, of which ",
                parallel.decode_context, " ranks of tensor_parallel_size=", parallel.tensor,
                " do not keep the same one; use ", most,
                ", or a tensor_parallel_size that is a multiple of ",
                model.num_kv_heads * parallel.decode_context));
}

ThreadShare thread_share(const EngineConfig& config, int rank) {
  const int32_t workers = config.parallel.num_workers();
  const ParallelConfig& parallel = config.parallel;
  // Of a rank of another node: as of the first one here.
  const int32_t local = rank - parallel.first_rank();
  const int32_t worker = parallel.replica * parallel.num_local_ranks() +
                         (local >= 0 && local < parallel.num_local_ranks() ? local : 0);
  const int32_t threads = std::max(config.num_threads, workers);
  const int32_t extra = threads % workers;
  return {.first = threads / workers * worker + std::min(worker, extra),
          .count = threads / workers + (worker < extra ? 1 : 0)};
}

StepShape largest_step(const ModelConfig& model, const WeightReport& weights,
                       const EngineConfig& config) {
  const SchedulerConfig& scheduler = config.scheduler;
  const int64_t block_size = config.cache.block_size;
  const int64_t max_blocks = (scheduler.max_model_len + block_size - 1) / block_size;
  StepShape shape = step_shape(model, weights, scheduler.max_num_batched_tokens);
  shape.weight_dtype = config.dtype;
  shape.cache_dtype = config.kv_cache_dtype;
  shape.max_sequences = scheduler.max_num_seqs;
  shape.max_context = max_blocks * block_size;
  shape.max_logit_rows = kMaxLogitRowsAtOnce;
  // Each token may have logits: those of prompts are asked for, too.
  shape.block_bytes = BatchBuilder(block_size, row_groups(config.cache.groups).size())
                          .num_bytes({.num_tokens = shape.max_tokens,
                                      .num_sequences = shape.max_sequences,
                                      .num_rows = shape.max_tokens,
                                      .max_blocks = max_blocks});
  return shape;
}

int64_t layer_state_bytes(const ModelConfig& model, const EngineConfig& config) {
  return int64_t{config.max_wanted_layers} * config.scheduler.max_num_batched_tokens *
         model.hidden_size * static_cast<int64_t>(sizeof(float));
}

void add_bytes(const WeightReport& rank, WeightReport& sum) {
  for (size_t i = 0; i < sum.group_bytes.size(); ++i) sum.group_bytes[i] += rank.group_bytes[i];
  sum.mapped_bytes += rank.mapped_bytes;
}

void check_kv_rows(DType dtype, const CacheGroupSpec& rows) {
  if (dtype != DType::kF8E4M3) return;
  if (rows.key_dim % 4 != 0 || rows.value_dim % 4 != 0)
    throw NotSupported(
        concat("kv_cache_dtype 'fp8' takes heads of a multiple of 4 elements, and this model has "
               "keys of ",
               rows.key_dim, " and values of ", rows.value_dim, "; use kv_cache_dtype='auto'"));
}

std::string packed_variant(const EngineConfig& config, const Backend& backend,
                           const Checkpoint& checkpoint, int rank, const LayerRange& layers) {
  constexpr size_t kShown = 16;  // digits of the digest
  const auto& quantization = checkpoint.quantization();
  return concat(
      quantization ? concat("read by ", digest(*quantization).substr(0, kShown), " ") : "",
      config.quantization.empty() ? "" : config.quantization + " of ", name(config.dtype), " in ",
      backend.packed_layout(),
      config.parallel.tensor == 1
          ? ""
          : concat(", rank ", tensor_rank(config, rank).rank, " of ", config.parallel.tensor,
                   config.parallel.has_whole_experts ? ", experts whole" : ""),
      config.parallel.cut == ParallelConfig().cut ? "" : concat(", cut by ", config.parallel.cut),
      layers.is_whole() ? "" : concat(", layers ", layers.begin, " to ", layers.end),
      layers.has_embedding ? ", with the embedding" : "");
}

}  // namespace llmserve
