// What an engine will take, before it takes it: the plan is made by the code that allocates.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/engine_config.h"
#include "core/memory.h"
#include "engine/config_resolver.h"
#include "kv_cache/cache_groups.h"
#include "models/model.h"

namespace llmserve {

// The element types of a KV cache: what runs, and what is planned for and does not run yet.
struct KvCacheDType {
  std::string_view name;
  int32_t bits = 0;         // an element
  int32_t scale_bytes = 0;  // a row of keys or values; 0 too where that is not decided yet
  bool is_supported = false;
};
std::span<const KvCacheDType> kv_cache_dtypes();
// Throws NotSupported that lists the names.
const KvCacheDType& find_kv_cache_dtype(std::string_view name);

// Bytes of one token in all layers of these groups, rounded up to whole bytes a layer. Without
// scales it is the arithmetic of the literature.
int64_t kv_bytes_per_token(std::span<const CacheGroupSpec> groups, const KvCacheDType& dtype,
                           bool with_scales = true);

// The arithmetic of a paged pool. A sequence takes whole blocks, of each cache group.
struct KvPool {
  int64_t bytes_per_token = 0;  // in all groups, with the room that they leave empty
  int32_t block_size = 16;      // tokens
  int64_t num_blocks = 0;
  std::vector<CacheGroupSpec> groups = std::vector<CacheGroupSpec>(1);  // of rows
  int64_t max_step_tokens = std::numeric_limits<int32_t>::max();        // of a sequence

  int64_t num_groups() const { return std::ssize(groups); }
  int64_t block_bytes() const { return bytes_per_token / num_groups() * block_size; }
  int64_t num_bytes() const { return num_blocks * block_bytes(); }
  // Tokens that are kept in every group; sequences longer than a window take less room.
  int64_t num_tokens() const { return num_blocks / num_groups() * block_size; }
  // At most, on a sequence's way to num_tokens.
  int64_t blocks_for(int64_t num_tokens) const {
    return max_blocks_held(groups, num_tokens, block_size, max_step_tokens);
  }
  // Sequences of `context` tokens each that lie in the pool at once, sharing nothing.
  int64_t num_users(int64_t context) const { return num_blocks / blocks_for(context); }
  // The largest pool in `num_bytes`. Throws InvalidArgument on sizes below 1.
  static KvPool of_bytes(int64_t num_bytes, int64_t bytes_per_token, int32_t block_size);
};

// What the process can take of the machine's memory.
struct MachineMemory {
  int64_t total_bytes = 0;  // the machine's or its control group's
  // Still to be had: what nobody holds, less reserved_bytes.
  int64_t available_bytes = 0;
  // Promised to this process's other engines, whose pools are touched only as they fill.
  int64_t reserved_bytes = 0;
  std::string bounded_by;  // the control group's file that says so; empty: the machine
};
// Of the host, or of a device.
MachineMemory read_machine_memory(const Memory& memory);

// What decided the pool's size: an argument's name.
enum class PoolBound : uint8_t { kNumBlocks, kKvCacheBytes, kUtilization, kMaxNumSeqs };
std::string_view name(PoolBound bound);

// What one of several ranks takes of the whole.
struct RankPlan {
  int32_t num_threads = 1;
  int64_t weight_bytes = 0;
  int64_t workspace_bytes = 0;
  int64_t scratch_bytes = 0;  // of workspace_bytes, the backend's own
  int64_t state_bytes = 0;    // of all state slots
  CacheGroupSpec rows;        // what it keeps of a token in each cache group, in all lanes
  int64_t kv_cache_bytes = 0;
  int64_t first_layer = 0;  // of its stage
  int64_t num_layers = 0;
};

struct MemoryPlan {
  EngineConfig config;  // complete: what the engine will be given
  std::string architecture;
  std::string format;           // of the checkpoint; "config" if there are no weights yet
  std::vector<RankPlan> ranks;  // of one replica
  WeightReport weights;         // of all ranks; on a host replicas share them, else of all
  int64_t workspace_bytes = 0;  // of all replicas, as are the two below
  int64_t state_bytes = 0;      // of all state slots
  // Of the draft model, where one guesses: what it takes beside the above.
  WeightReport draft_weights;
  int64_t draft_workspace_bytes = 0;
  int64_t draft_kv_bytes = 0;
  std::vector<CacheGroupSpec> draft_groups;  // as all ranks keep its rows together
  std::string draft_architecture;
  MachineMemory machine;
  double memory_utilization = 0;
  KvPool pool;  // of one replica
  PoolBound pool_bound = PoolBound::kUtilization;
  std::vector<KvPool> pool_by_dtype;  // parallel to kv_cache_dtypes(): the same settings in each
  std::string refusal;                // why the engine would not start; empty if it would

  int64_t kv_cache_bytes() const { return config.parallel.data * pool.num_bytes() + state_bytes; }
  int64_t draft_bytes() const {
    return draft_weights.total_bytes() + draft_workspace_bytes + draft_kv_bytes;
  }
  int64_t total_bytes() const {
    return weights.total_bytes() + workspace_bytes + kv_cache_bytes() + draft_bytes();
  }
};

// Opens request.model for a plan alone: a checkpoint, or a config.json by itself, whose weights are
// those of the model it describes. Throws what open_checkpoint and open_config throw.
Checkpoint open_for_plan(const ConfigRequest& request);

// Reads the config and the tensors' headers of `checkpoint`, which is request.model, and loads
// nothing. Settings that are wrong whatever the memory throw InvalidArgument, NotSupported or
// CorruptFile. What does not fit is a plan with a refusal.
//
// The KV pool's size, in this order: num_blocks, kv_cache_memory_bytes, else what
// memory_utilization of the available memory leaves after weights and workspace, but no more than
// max_num_seqs sequences of max_model_len can fill.
MemoryPlan plan_memory(const ConfigRequest& request, const Checkpoint& checkpoint);

// The plan's config. Throws ResourceExhausted with the plan's refusal where there is one.
EngineConfig resolve_config(const ConfigRequest& request, const Checkpoint& checkpoint);

}  // namespace llmserve
