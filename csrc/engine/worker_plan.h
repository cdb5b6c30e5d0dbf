// What a worker takes, and how it packs weights: the memory plan says so before there is a worker,
// and the worker takes just that.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "api/engine_config.h"
#include "io/checkpoint.h"
#include "kernels/backend.h"
#include "layers/kv_place.h"
#include "layers/rank_cut.h"
#include "layers/weight_report.h"
#include "models/layer_range.h"
#include "models/model_config.h"

namespace llmserve {

// Logits are computed for at most this many rows at a time: enough that the head's weights are read
// once for many rows, and a bound on the largest buffer of the step (64 rows of a 152k vocabulary
// are 39 MB).
inline constexpr int64_t kMaxLogitRowsAtOnce = 64;

// The place of a worker, rank `rank` of config.parallel.num_ranks(), among the ranks of its stage.
TensorRank tensor_rank(const EngineConfig& config, int rank);
// Its place among those of them that keep one KV cache together.
inline int32_t context_rank(const EngineConfig& config, int rank) {
  return rank % config.parallel.decode_context;
}
// Throws NotSupported where the ranks of config.parallel.decode_context would keep different keys.
void check_context_ranks(const ModelConfig& model, const ParallelConfig& parallel);
// Its stage of the pipeline: that of the first ranks is the last, so that rank 0 has the logits.
inline int stage_of(const EngineConfig& config, int rank) {
  return config.parallel.pipeline - 1 - rank / config.parallel.tensor;
}
// The layers of each stage of config.parallel.pipeline, which differ as little as can be in the
// bytes of weights that a decoded token reads: of a layer of experts those that it is given, of the
// last stage the head, too. Throws InvalidArgument where there are fewer layers than stages.
std::vector<LayerRange> split_layers(const EngineConfig& config, const Checkpoint& checkpoint,
                                     const ModelConfig& model, Backend& backend);
// What a rank keeps of the KV cache: the groups with its KV heads and the layers of its stage, and
// a place for each layer of the model, of which others' are none.
struct RankCache {
  std::vector<CacheGroupSpec> groups;
  std::vector<KvPlace> places;

  // A group of rows with as many layers as a block has room for.
  CacheGroupSpec lanes() const;
};
RankCache rank_cache(const ModelConfig& model, const TensorRank& rank, const LayerRange& layers);
// Threads of a worker: the ranks of all replicas in this process have about equal shares of
// config.num_threads, at least one each. `first` counts those of the ranks before it.
struct ThreadShare {
  int32_t first = 0;
  int32_t count = 1;
};
ThreadShare thread_share(const EngineConfig& config, int rank);

// The largest that these settings allow.
StepShape largest_step(const ModelConfig& model, const WeightReport& weights,
                       const EngineConfig& config);

// Of the hidden states of config.max_wanted_layers layers, of all tokens of the largest step.
int64_t layer_state_bytes(const ModelConfig& model, const EngineConfig& config);

// Another rank's bytes are added to `sum`.
void add_bytes(const WeightReport& rank, WeightReport& sum);

// Throws NotSupported where the ops take no such cache (kernels/ops.h).
void check_kv_rows(DType dtype, const CacheGroupSpec& rows);

// What packed weights of a rank depend on beside the checkpoint; PackedKey.
std::string packed_variant(const EngineConfig& config, const Backend& backend,
                           const Checkpoint& checkpoint, int rank, const LayerRange& layers);

}  // namespace llmserve
