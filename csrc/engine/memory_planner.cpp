#include "engine/memory_planner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/human_bytes.h"
#include "core/system.h"
#include "engine/draft_planner.h"
#include "engine/half_batches.h"
#include "engine/rank_devices.h"
#include "engine/worker_plan.h"
#include "io/checkpoint.h"
#include "io/packed_cache.h"
#include "models/config_reader.h"
#include "models/layer_kinds.h"
#include "models/model_loader.h"

namespace llmserve {
namespace {

constexpr std::array<KvCacheDType, 6> kKvCacheDTypes{{{"float32", 32, 0, true},
                                                      {"bfloat16", 16, 0, true},
                                                      {"float16", 16, 0, false},
                                                      {"fp8", 8, kCacheScaleBytes, true},
                                                      {"int8", 8, 0, false},
                                                      {"int4", 4, 0, false}}};

double resolve_utilization(const ConfigRequest& request, const Memory& memory) {
  const double share = request.memory_utilization.value_or(
      memory.is_host() ? kDefaultCpuMemoryUtilization : kDefaultDeviceMemoryUtilization);
  if (!(share > 0 && share <= 1)) {
    throw InvalidArgument(concat("gpu_memory_utilization must be in (0, 1], got ", share));
  }
  return share;
}

MachineMemory resolve_machine(const ConfigRequest& request, const EngineConfig& config,
                              const Memory& memory) {
  if (!request.available_memory_bytes && !has_rank_devices(config))
    return read_machine_memory(memory);
  const int64_t bytes = request.available_memory_bytes.value_or(
      has_rank_devices(config) ? free_rank_bytes(config) : 0);
  return {.total_bytes = bytes, .available_bytes = bytes};
}

// ", 42 of sequences' states", of a model whose layers have any.
std::string states_of(const MemoryPlan& plan) {
  return plan.state_bytes == 0
             ? ""
             : concat(", ", human_bytes(plan.state_bytes), " of sequences' states");
}

// Of ranks with a device each, what those with less leave free on theirs: no other one can have it.
int64_t idle_bytes(const MemoryPlan& plan) {
  if (!has_rank_devices(plan.config)) return 0;
  int64_t most = 0;
  int64_t sum = 0;
  const int first = plan.config.parallel.first_rank();
  const int num_ranks = plan.config.parallel.num_local_ranks();
  for (int rank = first; rank < first + num_ranks; ++rank) {
    const RankPlan& of = plan.ranks[static_cast<size_t>(rank)];
    int64_t bytes = of.weight_bytes + of.workspace_bytes + of.state_bytes;
    if (rank == 0)
      bytes += (plan.draft_weights.total_bytes() + plan.draft_workspace_bytes) /
               plan.config.parallel.data;
    most = std::max(most, bytes);
    sum += bytes;
  }
  return plan.config.parallel.data * (most * num_ranks - sum);
}

// Bytes beside the KV cache.
int64_t fixed_bytes(const MemoryPlan& plan) {
  return plan.weights.total_bytes() + plan.workspace_bytes + plan.state_bytes +
         plan.draft_weights.total_bytes() + plan.draft_workspace_bytes + idle_bytes(plan);
}

// Blocks of the draft model's pool, which is to hold as many tokens as the target's.
int64_t num_draft_blocks(const MemoryPlan& plan, const KvPool& pool) {
  if (!plan.config.draft) return 0;
  return pool.num_blocks / pool.num_groups() * std::ssize(plan.draft_groups);
}

int64_t draft_block_bytes(const MemoryPlan& plan) {
  if (plan.draft_groups.empty()) return 0;
  const EngineConfig& draft = *plan.config.draft;
  const KvCacheDType& dtype = find_kv_cache_dtype(kv_cache_dtype_name(draft.kv_cache_dtype));
  CacheGroupSpec whole = plan.draft_groups.front();
  whole.num_layers = num_lanes(plan.draft_groups);
  return kv_bytes_per_token({&whole, 1}, dtype) * draft.cache.block_size;
}

// ", 42 of a draft model", where there is one.
std::string draft_of(const MemoryPlan& plan) {
  return plan.config.draft ? concat(", ", human_bytes(plan.draft_bytes()), " of the draft model")
                           : "";
}

int64_t usable_bytes(const MemoryPlan& plan) {
  return static_cast<int64_t>(plan.memory_utilization *
                              static_cast<double>(plan.machine.available_bytes));
}

// What weights of another stage are and run as, beside their bytes.
void add_stage(const WeightReport& stage, WeightReport& all) {
  const auto add_new = [](const auto& from, auto& to) {
    for (const auto& item : from)
      if (std::ranges::find(to, item) == to.end()) to.push_back(item);
  };
  add_new(stage.integers, all.integers);
  add_new(stage.notes, all.notes);
  for (const QuantizedUse& use : stage.quantized) {
    const auto same = std::ranges::find_if(all.quantized, [&](const QuantizedUse& other) {
      return other.stored == use.stored && other.runs == use.runs;
    });
    if (same == all.quantized.end()) {
      all.quantized.push_back(use);
    } else {
      same->num_weights += use.num_weights;
    }
  }
  all.num_experts = std::max(all.num_experts, stage.num_experts);
  all.experts_per_token = std::max(all.experts_per_token, stage.experts_per_token);
}

// Of replicas that have a copy each.
void multiply(WeightReport& weights, int32_t num_replicas) {
  for (int64_t& num_bytes : weights.group_bytes) num_bytes *= num_replicas;
  weights.mapped_bytes *= num_replicas;
}

bool is_local(const ParallelConfig& parallel, int rank) {
  return rank >= parallel.first_rank() && rank < parallel.first_rank() + parallel.num_local_ranks();
}

// What a rank takes. The weights and workspace of one of this node are added to the plan's.
void add_rank(const ModelConfig& model, const Checkpoint& checkpoint, Backend& backend, int rank,
              const LayerRange& layers, MemoryPlan& plan) {
  const EngineConfig& config = plan.config;
  const RankCache kept = rank_cache(model, tensor_rank(config, rank), layers);
  PackedWeights packed;
  if (config.packed_cache.max_bytes > 0) {
    std::string ignored;  // load says it
    const PackedCache cache(config.packed_cache.folder);
    packed.file = cache.find(
        packed_key(checkpoint, packed_variant(config, backend, checkpoint, rank, layers)), {},
        ignored);
  }
  ModelPlan sizes = plan_model(checkpoint, model, backend,
                               {.format = resolve_weight_format(config.dtype, config.quantization),
                                .max_tokens = config.scheduler.max_num_batched_tokens,
                                .max_logit_rows = kMaxLogitRowsAtOnce,
                                .packed = &packed,
                                .rank = tensor_rank(config, rank),
                                .layers = layers});
  const int32_t num_threads = thread_share(config, rank).count;
  const int64_t scratch_bytes =
      backend.scratch_bytes(largest_step(model, sizes.weights, config), num_threads);
  const int64_t half_bytes =
      config.parallel.has_halves()
          ? 2 * plan_model(checkpoint, model, backend,
                           {.format = resolve_weight_format(config.dtype, config.quantization),
                            .max_tokens = first_half_of(config.scheduler.max_num_batched_tokens),
                            .max_logit_rows = 1,
                            .packed = &packed,
                            .rank = tensor_rank(config, rank),
                            .layers = layers})
                    .workspace_bytes
          : 0;
  const int64_t workspace_bytes =
      sizes.workspace_bytes + half_bytes + layer_state_bytes(model, config) + scratch_bytes +
      gathered_bytes(config, largest_step(model, sizes.weights, config));
  plan.ranks.push_back({.num_threads = num_threads,
                        .weight_bytes = sizes.weights.total_bytes(),
                        .workspace_bytes = workspace_bytes,
                        .scratch_bytes = scratch_bytes,
                        .state_bytes = config.scheduler.max_num_seqs * state_bytes(kept.groups),
                        .rows = kept.lanes(),
                        .first_layer = layers.begin,
                        .num_layers = layers.end_of(model.num_layers) - layers.begin});
  if (!is_local(config.parallel, rank)) return;
  plan.state_bytes += config.parallel.data * plan.ranks.back().state_bytes;
  plan.workspace_bytes += config.parallel.data * workspace_bytes;
  if (rank == config.parallel.first_rank()) {
    plan.weights = std::move(sizes.weights);
    return;
  }
  add_bytes(sizes.weights, plan.weights);
  if (tensor_rank(config, rank).rank == 0) add_stage(sizes.weights, plan.weights);
}

// The groups with the KV heads that all ranks of a stage keep together: some keep the same, each or
// together.
std::vector<CacheGroupSpec> groups_of_ranks(const MemoryPlan& plan) {
  const std::span<const CacheGroupSpec> rows = row_groups(plan.config.cache.groups);
  std::vector<CacheGroupSpec> groups(rows.begin(), rows.end());
  for (CacheGroupSpec& group : groups) {
    group.num_kv_heads = 0;
    for (int32_t i = 0; i < plan.config.parallel.tensor; i += plan.config.parallel.decode_context)
      group.num_kv_heads += plan.ranks[static_cast<size_t>(i)].rows.num_kv_heads;
  }
  return groups;
}

// Of a token in one cache group on this node, with the room that others leave empty.
int64_t bytes_of_ranks(const MemoryPlan& plan, const KvCacheDType& dtype) {
  int64_t bytes = 0;
  int64_t most = 0;
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank) {
    if (!is_local(plan.config.parallel, static_cast<int>(rank)) ||
        context_rank(plan.config, static_cast<int>(rank)) != 0)
      continue;
    const int64_t of_rank = kv_bytes_per_token({&plan.ranks[rank].rows, 1}, dtype);
    bytes += of_rank;
    most = std::max(most, of_rank);
  }
  // On devices of their own all have as much room as the one that needs most.
  return has_rank_devices(plan.config) ? most * plan.config.parallel.num_local_ranks() : bytes;
}

struct SizedPool {
  KvPool pool;
  PoolBound bound;
};

// The order is that of plan_memory's documentation.
SizedPool size_pool(const ConfigRequest& request, const MemoryPlan& plan,
                    const KvCacheDType& dtype) {
  const std::vector<CacheGroupSpec> groups = groups_of_ranks(plan);
  SizedPool sized{{.bytes_per_token = bytes_of_ranks(plan, dtype) * std::ssize(groups),
                   .block_size = plan.config.cache.block_size,
                   .groups = groups,
                   .max_step_tokens = plan.config.scheduler.max_num_batched_tokens},
                  PoolBound::kUtilization};
  KvPool& pool = sized.pool;
  if (request.num_blocks) {
    pool.num_blocks = *request.num_blocks;
    sized.bound = PoolBound::kNumBlocks;
  } else if (request.kv_cache_memory_bytes) {
    pool.num_blocks = *request.kv_cache_memory_bytes / pool.block_bytes();
    sized.bound = PoolBound::kKvCacheBytes;
  } else {
    const SchedulerConfig& scheduler = plan.config.scheduler;
    const int64_t useful = scheduler.max_num_seqs * pool.blocks_for(scheduler.max_model_len);
    const int64_t left = std::max<int64_t>(0, usable_bytes(plan) - fixed_bytes(plan));
    // Each block of the target comes with one of the draft, a share of one, or none.
    const int64_t draft_bytes =
        std::ssize(groups) == 0
            ? 0
            : draft_block_bytes(plan) * std::ssize(plan.draft_groups) / std::ssize(groups);
    const int64_t each = plan.config.parallel.data * (pool.block_bytes() + draft_bytes);
    pool.num_blocks = std::min(left / each, useful);
    if (pool.num_blocks == useful) sized.bound = PoolBound::kMaxNumSeqs;
  }
  pool.num_blocks = std::min<int64_t>(
      pool.num_blocks, std::numeric_limits<int32_t>::max() / plan.config.cache.block_size);
  return sized;
}

// "gpu_memory_utilization=0.63 or more, ", where some share would do.
std::string share_to_pass(const MemoryPlan& plan, int64_t needed_bytes) {
  const double needed = static_cast<double>(needed_bytes) /
                        static_cast<double>(std::max<int64_t>(1, plan.machine.available_bytes));
  const double rounded = std::ceil(needed * 100 + 1e-9) / 100;
  if (plan.pool_bound != PoolBound::kUtilization || rounded > 1) return "";
  return concat("gpu_memory_utilization=", rounded, " or more, ");
}

// ", by FILE" where a control group leaves less than the machine has.
std::string bound_of(const MachineMemory& machine) {
  return machine.bounded_by.empty() ? "" : concat(", by ", machine.bounded_by);
}

std::string refuse_fixed(const MemoryPlan& plan, int64_t sequence_bytes) {
  const int64_t fixed = fixed_bytes(plan);
  const int64_t needed = fixed + plan.config.parallel.data * sequence_bytes;
  return concat("the model needs ", human_bytes(plan.weights.total_bytes()), " of weights and ",
                human_bytes(plan.workspace_bytes), " of workspace", states_of(plan), draft_of(plan),
                ", ", human_bytes(fixed), " together, and ", plan.memory_utilization, " of the ",
                human_bytes(plan.machine.available_bytes), " available (of ",
                human_bytes(plan.machine.total_bytes), bound_of(plan.machine), ") is ",
                human_bytes(usable_bytes(plan)), "; pass ", share_to_pass(plan, needed),
                "dtype=\"bfloat16\" if it is not, a smaller model or max_num_batched_tokens, or "
                "free memory");
}

std::string refuse_short_pool(const MemoryPlan& plan, int64_t sequence_bytes) {
  const KvPool& pool = plan.pool;
  std::ostringstream out;
  out << "a sequence of max_model_len=" << plan.config.scheduler.max_model_len << " tokens needs "
      << human_bytes(sequence_bytes) << " of KV cache (" << human_bytes(pool.bytes_per_token)
      << " a token), and the pool has " << human_bytes(pool.num_bytes()) << " (by "
      << name(plan.pool_bound) << "); pass ";
  if (plan.pool_bound == PoolBound::kNumBlocks)
    out << "num_gpu_blocks_override=" << sequence_bytes / pool.block_bytes() << " or more";
  if (plan.pool_bound == PoolBound::kKvCacheBytes)
    out << "kv_cache_memory_bytes=" << sequence_bytes << " or more";
  if (plan.pool_bound == PoolBound::kUtilization) {
    const std::string share =
        share_to_pass(plan, fixed_bytes(plan) + plan.config.parallel.data * sequence_bytes);
    out << (share.empty() ? "a smaller dtype or kv_cache_dtype"
                          : share.substr(0, share.size() - 2));
  }
  if (pool.num_tokens() >= 2) out << ", or max_model_len=" << pool.num_tokens() << " or less";
  return out.str();
}

// A size that was asked for and that the memory cannot hold.
std::string refuse_large_pool(const MemoryPlan& plan) {
  const KvPool& pool = plan.pool;
  const int64_t left = plan.machine.available_bytes - fixed_bytes(plan);
  const int64_t blocks =
      std::max<int64_t>(0, left) / (plan.config.parallel.data * pool.block_bytes());
  std::ostringstream out;
  out << "weights of " << human_bytes(plan.weights.total_bytes()) << ", workspace of "
      << human_bytes(plan.workspace_bytes) << states_of(plan) << draft_of(plan)
      << " and a KV cache of " << human_bytes(plan.config.parallel.data * pool.num_bytes())
      << " (by " << name(plan.pool_bound) << ") are " << human_bytes(plan.total_bytes()) << ", and "
      << human_bytes(plan.machine.available_bytes) << " are available; pass ";
  if (blocks > 0) {
    if (plan.pool_bound == PoolBound::kNumBlocks) out << "num_gpu_blocks_override=" << blocks;
    if (plan.pool_bound == PoolBound::kKvCacheBytes)
      out << "kv_cache_memory_bytes=" << blocks * pool.block_bytes();
    out << " or less, or free memory";
  } else {
    out << "a smaller model or dtype, or free memory";
  }
  return out.str();
}

std::string find_refusal(const MemoryPlan& plan) {
  const int64_t sequence_bytes =
      plan.pool.blocks_for(plan.config.scheduler.max_model_len) * plan.pool.block_bytes();
  if (plan.pool_bound == PoolBound::kUtilization && usable_bytes(plan) <= fixed_bytes(plan))
    return refuse_fixed(plan, sequence_bytes);
  if (plan.pool.num_bytes() < sequence_bytes) return refuse_short_pool(plan, sequence_bytes);
  if (plan.total_bytes() > plan.machine.available_bytes) return refuse_large_pool(plan);
  return "";
}

}  // namespace

std::span<const KvCacheDType> kv_cache_dtypes() { return kKvCacheDTypes; }

const KvCacheDType& find_kv_cache_dtype(std::string_view name) {
  std::ostringstream known;
  for (const KvCacheDType& row : kKvCacheDTypes) {
    if (row.name == name) return row;
    known << (known.tellp() > 0 ? ", " : "") << row.name;
  }
  throw NotSupported(
      concat("KV cache dtype \"", name.substr(0, 80), "\" is not known (", known.str(), ")"));
}

int64_t kv_bytes_per_token(std::span<const CacheGroupSpec> groups, const KvCacheDType& dtype,
                           bool with_scales) {
  int64_t bytes = 0;
  for (const CacheGroupSpec& group : groups) {
    const int64_t scale_bytes = with_scales ? group.num_rows() * dtype.scale_bytes : 0;
    bytes += group.num_layers * ((group.num_elements() * dtype.bits + 7) / 8 + scale_bytes);
  }
  return bytes;
}

KvPool KvPool::of_bytes(int64_t num_bytes, int64_t bytes_per_token, int32_t block_size) {
  if (num_bytes < 0 || bytes_per_token < 1 || block_size < 1)
    throw InvalidArgument(concat("a KV pool needs sizes of at least 1, got ", num_bytes, " bytes, ",
                                 bytes_per_token, " a token, blocks of ", block_size));
  KvPool pool{.bytes_per_token = bytes_per_token, .block_size = block_size};
  pool.num_blocks = num_bytes / pool.block_bytes();
  return pool;
}

std::string_view name(PoolBound bound) {
  static constexpr std::array<std::string_view, 4> kNames{
      "num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_seqs"};
  return kNames[static_cast<size_t>(bound)];
}

MachineMemory read_machine_memory(const Memory& memory) {
  if (!memory.is_host()) {
    const int64_t available = memory.available_bytes();
    return {.total_bytes = available, .available_bytes = available};
  }
  const MemoryLimits limits = read_memory_limits();
  const int64_t reserved = host_allocations().untouched_bytes;
  return {.total_bytes = limits.total_bytes,
          .available_bytes = std::max<int64_t>(0, limits.available_bytes - reserved),
          .reserved_bytes = reserved,
          .bounded_by = limits.bounded_by};
}

Checkpoint open_for_plan(const ConfigRequest& request) {
  return request.model.ends_with(".json") ? open_config(request.model)
                                          : open_checkpoint(request.model);
}

MemoryPlan plan_memory(const ConfigRequest& request, const Checkpoint& checkpoint) {
  const ModelConfig model =
      read_model_config(checkpoint.config(), check_max_model_len(request.max_model_len));
  MemoryPlan plan;
  plan.config = resolve_settings(request, checkpoint, model);
  plan.config.cache.groups = model.cache_groups;
  if (state_bytes(model.cache_groups) > 0)
    plan.config.cache.num_state_slots = plan.config.scheduler.max_num_seqs;
  check_context_ranks(model, plan.config.parallel);
  plan.architecture = model.architecture;
  plan.format = checkpoint.format();
  const std::unique_ptr<Backend> backend = make_backend(plan.config.device, {.num_threads = 1});
  if (plan.config.packed_cache.max_bytes > 0 && backend->packed_layout().empty())
    throw NotSupported(concat("packed_cache_bytes is not supported on device '", backend->name(),
                              "', whose weights no file can hold; leave it out or use "
                              "device='cpu'"));
  // It says whose states a step gives.
  PlannedDraft draft = plan_draft(request, checkpoint, model, plan.config);
  plan.config.draft = std::move(draft.config);
  plan.config.max_wanted_layers = std::max(plan.config.max_wanted_layers, draft.max_wanted_layers);
  plan.config.has_late_embedding = draft.has_late_embedding;
  plan.draft_weights = std::move(draft.weights);
  plan.draft_workspace_bytes = draft.workspace_bytes;
  plan.draft_groups = std::move(draft.groups);
  const int32_t num_replicas = plan.config.parallel.data;
  multiply(plan.draft_weights, num_replicas);
  plan.draft_architecture = std::move(draft.architecture);
  const std::vector<LayerRange> stages = split_layers(plan.config, checkpoint, model, *backend);
  for (int rank = 0; rank < plan.config.parallel.num_ranks(); ++rank)
    add_rank(model, checkpoint, *backend, rank,
             stages[static_cast<size_t>(stage_of(plan.config, rank))], plan);
  for (size_t rank = 0; rank < draft.scratch_bytes.size(); ++rank)
    plan.draft_workspace_bytes +=
        std::max<int64_t>(0, draft.scratch_bytes[rank] - plan.ranks[rank].scratch_bytes);
  plan.draft_workspace_bytes *= num_replicas;
  if (has_rank_devices(plan.config)) multiply(plan.weights, num_replicas);
  const WeightFormat format = resolve_weight_format(plan.config.dtype, plan.config.quantization);
  check_all_used(checkpoint,
                 stages.size() == 1
                     ? plan.weights
                     : plan_model(checkpoint, model, *backend, {.format = format}).weights);
  check_kv_rows(plan.config.kv_cache_dtype, plan.config.cache.groups.front());
  plan.memory_utilization = resolve_utilization(request, backend->memory());
  plan.machine = resolve_machine(request, plan.config, backend->memory());

  for (const KvCacheDType& dtype : kKvCacheDTypes) {
    const SizedPool sized = size_pool(request, plan, dtype);
    plan.pool_by_dtype.push_back(sized.pool);
    if (dtype.name != kv_cache_dtype_name(plan.config.kv_cache_dtype)) continue;
    plan.pool = sized.pool;
    plan.pool_bound = sized.bound;
  }
  plan.config.cache.num_blocks = static_cast<int32_t>(plan.pool.num_blocks);
  const KvCacheDType& kept = find_kv_cache_dtype(kv_cache_dtype_name(plan.config.kv_cache_dtype));
  const int64_t sharing = plan.config.parallel.decode_context;
  for (size_t i = 0; i < plan.ranks.size(); ++i) {
    RankPlan& rank = plan.ranks[i];
    const int64_t rows =
        plan.pool.num_blocks * plan.pool.block_size * kv_bytes_per_token({&rank.rows, 1}, kept);
    const int64_t place = context_rank(plan.config, static_cast<int>(i));
    rank.kv_cache_bytes = rows * (place + 1) / sharing - rows * place / sharing + rank.state_bytes;
  }
  if (plan.config.draft) {
    EngineConfig guesses = *plan.config.draft;
    guesses.cache.num_blocks = static_cast<int32_t>(num_draft_blocks(plan, plan.pool));
    plan.draft_kv_bytes = num_replicas * guesses.cache.num_blocks * draft_block_bytes(plan);
    plan.config.draft = std::make_shared<const EngineConfig>(std::move(guesses));
  }
  plan.refusal = find_refusal(plan);
  return plan;
}

EngineConfig resolve_config(const ConfigRequest& request, const Checkpoint& checkpoint) {
  MemoryPlan plan = plan_memory(request, checkpoint);
  if (!plan.refusal.empty()) throw ResourceExhausted(plan.refusal);
  return std::move(plan.config);
}

}  // namespace llmserve
