// What a worker takes, and how it packs weights: the memory plan says so before there is a worker,
// and the worker takes just that.
#pragma once

#include <cstdint>
#include <string>

#include "api/engine_config.h"
#include "kernels/backend.h"
#include "layers/rank_cut.h"
#include "layers/weight_report.h"
#include "models/model_config.h"

namespace llmserve {

// Logits are computed for at most this many rows at a time: enough that the head's weights are read
// once for many rows, and a bound on the largest buffer of the step (64 rows of a 152k vocabulary
// are 39 MB).
inline constexpr int64_t kMaxLogitRowsAtOnce = 64;

// The place of a worker, rank `rank` of config.parallel.num_ranks().
TensorRank tensor_rank(const EngineConfig& config, int rank);
// Threads of a worker: the ranks of all replicas have about equal shares of config.num_threads, at
// least one each. `first` counts those of the ranks before it.
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
                           const Checkpoint& checkpoint, int rank);

}  // namespace llmserve
