// One rank of a head that drafts: its share of the weights, the rows of its KV heads, and what it
// computes with, on the backend and the thread of its rank of the target. HeadWorker says what.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "api/engine_config.h"
#include "comm/single_communicator.h"
#include "core/arena.h"
#include "core/buffer.h"
#include "engine/executor.h"
#include "engine/kv_storage.h"
#include "engine/worker.h"
#include "models/draft_heads/draft_head.h"
#include "speculation/head_model.h"

namespace llmserve {

// What a rank of a head takes beside its weights and its KV cache. The first has what is drawn
// from, too.
int64_t head_workspace_bytes(const DraftHead& head, const EngineConfig& config, int rank);
// Rows that a run leaves for the next, at most: of its logit rows, or of all where each place has
// its layer.
int64_t num_head_outputs(const HeadConfig& head, const EngineConfig& config);
// A head's cache groups as a rank keeps them.
std::vector<CacheGroupSpec> head_cache_groups(const HeadConfig& head, const TensorRank& rank);

// All calls come from one thread, which is the rank's.
class HeadRank {
 public:
  // logits [n, D] of the rows [begin, begin + n) of a step's logit rows, in the arena.
  using TakeLogits = std::function<void(const ConstTensor& logits, size_t begin)>;

  // Of config.parallel, for rank `rank` of the target, which outlives it. load() comes first.
  HeadRank(const EngineConfig& config, const Worker& target, int rank);

  // Again after release_weights(). Throws what loading throws, and InvalidArgument for a head of
  // other sizes than the first; then it is as it was.
  void load(const HeadConfig& head, const Checkpoint& checkpoint);
  // Its config stays.
  void release_weights(const Checkpoint& checkpoint);
  void release_cache() { kv_storage_.reset(); }
  void restore_cache();

  bool has_weights() const { return has_weights_; }
  const DraftHead& head() const { return *head_; }
  Backend& backend() const { return backend_; }

  // Runs a step whose arrays `input` has; kept [num_kept, state size]. take: called on rank 0.
  void run(const HeadStep& step, const ModelInput& input,
           std::span<const std::pair<int32_t, int32_t>> copies, const ConstTensor& kept,
           const TakeLogits& take);
  // [n, V] in the arena: logits [n, D] by the target's tokens, -inf where the head has none.
  Tensor expand(const ConstTensor& logits);

  MemoryUse memory_use() const;

 private:
  void read_features(const ForwardContext& context, const HeadStep& step, const ConstTensor& kept,
                     const Tensor& features);

  const EngineConfig& config_;
  const Worker& target_;
  const int rank_;
  Backend& backend_;
  std::unique_ptr<DraftHead> head_;  // its weights may be given back, its config stays
  bool has_weights_ = false;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<KvStorage> kv_storage_;
  Buffer outputs_;  // [outputs, H] f32 of the last run: HeadStep::sources are rows of them
  std::vector<int32_t> all_rows_;
  int64_t workspace_bytes_ = 0;
  int64_t scratch_bytes_ = 0;  // that the backend keeps for it beyond what the target needs
  // Where logits are in a device's memory: on their way through the host.
  std::vector<float> host_logits_, host_expanded_;
  SingleCommunicator alone_;
};

}  // namespace llmserve
