// The typed settings of one engine. Python fills them in; defaults that depend on the model are
// resolved before.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "api/config_fields.h"
#include "api/speculation_config.h"
#include "core/cache_group.h"
#include "core/dtype.h"

namespace llmserve {

// Memory beneath the KV pool, where full blocks are kept after the pool has evicted them.
struct TierConfig {
  int32_t num_blocks = 0;   // 0: there is none
  int32_t max_stores = 64;  // blocks that are on the way there at a time

  void validate() const;
};

struct CacheConfig {
  int32_t block_size =
      16;  // tokens a block: 8, 16, 32, 64 …; divides or is a multiple of nothing else
  int32_t num_blocks = 0;
  bool enable_prefix_caching = true;
  std::vector<CacheGroupSpec> groups = std::vector<CacheGroupSpec>(1);  // those of rows first
  TierConfig lower_tier;                                                // with prefix caching only
  // Where a group keeps states: a slot for each sequence that runs, and others for snapshots.
  int32_t num_state_slots = 0;

  static constexpr auto fields() {
    return std::tuple{
        ConfigField{"block_size", &CacheConfig::block_size, 1},
        ConfigField{"num_blocks", &CacheConfig::num_blocks, 1},
        ConfigField{"enable_prefix_caching", &CacheConfig::enable_prefix_caching},
        ConfigField{"groups", &CacheConfig::groups},
    };
  }
  void validate() const;
};

struct SchedulerConfig {
  std::string policy = "fcfs";            // a name of the policy registry
  int32_t max_num_batched_tokens = 2048;  // tokens a step: prefill chunks and decodes together
  int32_t max_num_seqs = 256;             // sequences in one step
  int32_t max_num_queued_reqs = 0;        // waiting requests before add() refuses; 0: no bound
  int64_t max_model_len = 0;              // prompt and output of one sequence
  bool enable_chunked_prefill = true;     // false: a prompt runs in one step or waits
  // While sequences decode, a step takes no more tokens than run in this time at the rate of the
  // last steps with prompts; 0: no bound but max_num_batched_tokens.
  int64_t max_stall_us = 0;
  // While sequences decode, a step takes this many tokens (or a multiple, where so few run slowly:
  // spread_size.h) and more only where a prompt has to run for its request to end, if it generates
  // its max_tokens, no later than all others: steps stay full to the end of a batch. 0: prompts run
  // as soon as they may.
  int32_t min_spread_tokens = 0;
  // Tokens of the KV cache that stay free when a sequence enters beside others, for those that run
  // to grow into; 0: it enters where it fits.
  int64_t admission_reserve_tokens = 0;
  int64_t max_batch_delay_us = 10'000;  // policy "dynamic": waits a fifth of it up to all of it
  std::vector<int32_t> eos_token_ids;   // end a sequence unless ignore_eos

  static constexpr auto fields() {
    return std::tuple{
        ConfigField{"policy", &SchedulerConfig::policy},
        ConfigField{"max_num_batched_tokens", &SchedulerConfig::max_num_batched_tokens, 1},
        ConfigField{"max_num_seqs", &SchedulerConfig::max_num_seqs, 1},
        ConfigField{"max_num_queued_reqs", &SchedulerConfig::max_num_queued_reqs, 0},
        ConfigField{"max_model_len", &SchedulerConfig::max_model_len, 2},
        ConfigField{"enable_chunked_prefill", &SchedulerConfig::enable_chunked_prefill},
        ConfigField{"max_stall_us", &SchedulerConfig::max_stall_us, 0},
        ConfigField{"min_spread_tokens", &SchedulerConfig::min_spread_tokens, 0},
        ConfigField{"admission_reserve_tokens", &SchedulerConfig::admission_reserve_tokens, 0},
        ConfigField{"max_batch_delay_us", &SchedulerConfig::max_batch_delay_us, 0},
        ConfigField{"eos_token_ids", &SchedulerConfig::eos_token_ids},
    };
  }
  void validate() const;
};

// Where the weights that this model's engines have packed are kept for the next start.
struct PackedCacheConfig {
  std::string folder;
  int64_t max_bytes = 0;  // of all models' together; 0: nothing is kept or looked for

  static constexpr auto fields() {
    return std::tuple{
        ConfigField{"packed_cache_folder", &PackedCacheConfig::folder},
        ConfigField{"packed_cache_bytes", &PackedCacheConfig::max_bytes},
    };
  }
};

// The KV cache's element types as LLM(kv_cache_dtype=...) has them: "float32", "bfloat16", "fp8".
std::string_view kv_cache_dtype_name(DType dtype);
// Of a name, "fp8_e4m3" being "fp8", and "auto" what the weights have. Throws NotSupported.
DType kv_cache_dtype_from_name(std::string_view text, DType weights);

// How ranks share o_proj and down_proj: LinearCut of layers/rank_cut.h, in its order.
inline constexpr std::array<std::string_view, 3> kTensorParallelCuts{"columns", "rows", "tree"};

// How many ranks a model is cut among, and how many engines run it. Ranks are threads of one
// process, or of one a machine.
struct ParallelConfig {
  int32_t tensor = 1;              // ranks that share each layer
  bool has_whole_experts = false;  // of a layer of experts each has some, in the place of a part
  // Of them so many keep one KV cache together, in the place of a copy each: a divisor of `tensor`.
  int32_t decode_context = 1;
  std::string cut = "columns";  // of kTensorParallelCuts
  int32_t pipeline = 1;         // stages, each of some layers, of as many ranks
  // Replicas: engines with the same weights. Each has ranks of its own; what bounds a step or a
  // KV cache is of one replica.
  int32_t data = 1;
  int32_t replica = 0;  // of them, which one this config is of
  // Processes that have the ranks together, each about as many, and which of them this one is. The
  // first has rank 0 and takes requests. The others find it at an IP address and a port.
  int32_t nodes = 1;
  int32_t node = 0;
  std::string master_address = "127.0.0.1";
  int32_t master_port = 29501;
  std::string cluster_key;          // that all of them have; none: on one machine alone
  int32_t cluster_timeout_s = 600;  // for others to come, at the start and after one was lost
  // Steps that run a prompt, of at least so many tokens, run in two halves where ranks are on
  // several nodes: one half's exchanges are on the wire while the other computes.
  bool overlaps_halves = false;
  int32_t min_overlapped_tokens = 512;

  static constexpr auto fields() {
    return std::tuple{
        ConfigField{"tensor_parallel_size", &ParallelConfig::tensor, 1},
        ConfigField{"enable_expert_parallel", &ParallelConfig::has_whole_experts},
        ConfigField{"decode_context_parallel_size", &ParallelConfig::decode_context, 1},
        ConfigField{"tensor_parallel_cut", &ParallelConfig::cut},
        ConfigField{"pipeline_parallel_size", &ParallelConfig::pipeline, 1},
        ConfigField{"data_parallel_size", &ParallelConfig::data, 1},
        ConfigField{"nnodes", &ParallelConfig::nodes, 1},
        ConfigField{"node_rank", &ParallelConfig::node, 0},
        ConfigField{"master_addr", &ParallelConfig::master_address},
        ConfigField{"master_port", &ParallelConfig::master_port, 1},
        ConfigField{"cluster_key", &ParallelConfig::cluster_key},
        ConfigField{"distributed_timeout_seconds", &ParallelConfig::cluster_timeout_s, 1},
        ConfigField{"enable_dbo", &ParallelConfig::overlaps_halves},
        ConfigField{"dbo_prefill_token_threshold", &ParallelConfig::min_overlapped_tokens, 2},
    };
  }
  int32_t num_ranks() const { return tensor * pipeline; }  // of a replica
  // Those of a node follow one another.
  int32_t first_rank_of(int32_t of_node) const {
    return num_ranks() * of_node / (nodes < 1 ? 1 : nodes);
  }
  int32_t first_rank() const { return first_rank_of(node); }
  int32_t num_local_ranks() const { return first_rank_of(node + 1) - first_rank(); }
  int32_t num_workers() const { return data * num_local_ranks(); }  // of this process
  // Those of the last stage are the first ones. Of them, those of a replica in this process.
  int32_t num_local_last_ranks() const {
    const int32_t count = tensor - first_rank();
    return count < 0 ? 0 : count < num_local_ranks() ? count : num_local_ranks();
  }
  // Whether any step runs in halves: a wire is between the ranks of a layer.
  bool has_halves() const { return overlaps_halves && nodes > 1 && pipeline == 1; }
  void validate() const;
};

struct EngineConfig {
  std::string model_path;      // a checkpoint directory
  std::string device = "cpu";  // a name of the backend registry
  DType dtype = DType::kF32;   // of weights: kF32 or kBF16
  // What linear layers are kept as instead: a name of quant/linear_format.h, or none.
  std::string quantization;
  DType kv_cache_dtype = DType::kF32;  // kF32, kBF16 or kF8E4M3
  int32_t num_threads = 1;             // of all ranks together
  ParallelConfig parallel;
  uint64_t seed = 0;
  CacheConfig cache;
  SchedulerConfig scheduler;
  PackedCacheConfig packed_cache;
  SpeculationConfig speculation;
  int32_t max_logprobs = 20;  // of a request; -1: no bound
  // Of the draft model that `speculation` names, resolved as this is; null: it has none.
  std::shared_ptr<const EngineConfig> draft;
  // On a device: the next step is scheduled and launched while one is under way. A host has nothing
  // to gain by it.
  bool async_scheduling = true;
  // On a device: true asks for every step anew, where decode steps would be recorded as graphs.
  bool enforce_eager = false;
  // Hidden states of at most so many layers are wanted of a step, by a drafter; memory for those of
  // the largest step is taken at load.
  int32_t max_wanted_layers = 0;
  // Of several stages the last one has the embedding, too, which its head that drafts reads.
  bool has_late_embedding = false;
  // Linear weights run on their rows in the file until they have been packed, between steps. None:
  // where packing takes long enough to be waited for. Not with a packed_cache.
  std::optional<bool> defer_packing;

  // But for the dtypes, which have names of their own.
  static constexpr auto fields() {
    return std::tuple{
        ConfigField{"model_path", &EngineConfig::model_path},
        ConfigField{"device", &EngineConfig::device},
        ConfigField{"quantization", &EngineConfig::quantization},
        ConfigField{"num_threads", &EngineConfig::num_threads, 1},
        ConfigField{"seed", &EngineConfig::seed},
        ConfigField{"parallel", &EngineConfig::parallel},
        ConfigField{"cache", &EngineConfig::cache},
        ConfigField{"scheduler", &EngineConfig::scheduler},
        ConfigField{"speculation", &EngineConfig::speculation},
        ConfigField{"max_logprobs", &EngineConfig::max_logprobs, -1},
        ConfigField{"async_scheduling", &EngineConfig::async_scheduling},
        ConfigField{"enforce_eager", &EngineConfig::enforce_eager},
        ConfigField{"max_wanted_layers", &EngineConfig::max_wanted_layers, 0},
        ConfigField{"defer_packing", &EngineConfig::defer_packing},
    };
  }
  void validate() const;
};

}  // namespace llmserve
