#include "api/engine_config.h"

#include <algorithm>
#include <array>
#include <span>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr int32_t kMaxRanks = 64;
constexpr std::array kKvCacheDTypes{DType::kF32, DType::kBF16, DType::kF8E4M3};

}  // namespace

void TierConfig::validate() const {
  if (num_blocks < 0 || max_stores < 1) {
    throw InvalidArgument(
        concat("lower_tier: num_blocks must be at least 0 and max_stores at least 1, got ",
               num_blocks, " and ", max_stores));
  }
}

void CacheConfig::validate() const {
  check_minimums(*this);
  if (block_size > 256)
    throw InvalidArgument(concat("block_size must be at most 256, got ", block_size));
  const std::span<const CacheGroupSpec> rows = row_groups(groups);
  if (rows.empty()) throw InvalidArgument("cache groups of rows must be at least 1, got 0");
  for (const CacheGroupSpec& group : groups) {
    if (group.window < 0)
      throw InvalidArgument(concat("window must be at least 0, got ", group.window));
  }
  const std::span<const CacheGroupSpec> states = std::span(groups).subspan(rows.size());
  if (!std::ranges::all_of(states, &CacheGroupSpec::is_state))
    throw InvalidArgument("cache groups of rows come before those of states");
  lower_tier.validate();
  if (num_state_slots < 0 || (num_state_slots > 0) == states.empty())
    throw InvalidArgument(concat(
        "num_state_slots must be ",
        states.empty() ? "0 where no group keeps states" : "at least 1 where a group keeps states",
        ", got ", num_state_slots));
}

void SchedulerConfig::validate() const {
  check_minimums(*this);
  if (max_num_batched_tokens < max_num_seqs) {
    throw InvalidArgument(concat("max_num_batched_tokens (", max_num_batched_tokens,
                                 ") must be at least max_num_seqs (", max_num_seqs,
                                 "), so that every running sequence can have a token a step"));
  }
  if (!enable_chunked_prefill && max_num_batched_tokens < max_model_len) {
    throw InvalidArgument(concat("without chunked prefill max_num_batched_tokens (",
                                 max_num_batched_tokens, ") must be at least max_model_len (",
                                 max_model_len, "); raise it or set enable_chunked_prefill=True"));
  }
  if (!enable_chunked_prefill && max_stall_us > 0) {
    throw InvalidArgument(
        "without chunked prefill no step can be cut to max_stall_ms; set it to 0 or "
        "enable_chunked_prefill=True");
  }
  if (!enable_chunked_prefill && min_spread_tokens > 0) {
    throw InvalidArgument(
        "without chunked prefill no prompt can be spread over steps; set min_spread_tokens to 0 or "
        "enable_chunked_prefill=True");
  }
}

std::string_view kv_cache_dtype_name(DType dtype) {
  return dtype == DType::kF8E4M3 ? "fp8" : name(dtype);
}

DType kv_cache_dtype_from_name(std::string_view text, DType weights) {
  if (text == "auto") return weights;
  if (text == "fp8_e4m3") return DType::kF8E4M3;
  for (const DType dtype : kKvCacheDTypes)
    if (text == kv_cache_dtype_name(dtype)) return dtype;
  throw NotSupported(concat("kv_cache_dtype must be auto, float32, bfloat16 or fp8, got \"",
                            text.substr(0, 80), "\""));
}

void ParallelConfig::validate() const {
  check_minimums(*this);
  if (std::ranges::find(kTensorParallelCuts, cut) == kTensorParallelCuts.end())
    throw InvalidArgument(concat("tensor_parallel_cut must be columns, rows or tree, got \"",
                                 cut.substr(0, 80), "\""));
  for (const auto& [size_name, size] :
       {std::pair{"tensor_parallel_size", tensor}, std::pair{"pipeline_parallel_size", pipeline},
        std::pair{"data_parallel_size", data}})
    if (size > kMaxRanks)
      throw InvalidArgument(concat(size_name, " must be at most ", kMaxRanks, ", got ", size));
  if (data * num_ranks() > kMaxRanks)
    throw InvalidArgument(concat("tensor_parallel_size=", tensor, ", pipeline_parallel_size=",
                                 pipeline, " and data_parallel_size=", data, " are ",
                                 data * num_ranks(), " ranks, of which there may be ", kMaxRanks));
  if (tensor % decode_context != 0)
    throw InvalidArgument(concat("decode_context_parallel_size=", decode_context,
                                 " does not divide tensor_parallel_size=", tensor,
                                 ", whose ranks it takes together"));
  if (replica < 0 || replica >= data)
    throw InvalidArgument(concat("there is no replica ", replica, " of ", data));
  if (node >= nodes)
    throw InvalidArgument(
        concat("node_rank must be less than nnodes=", nodes, ", got ", node, "; 0 is the first"));
  if (nodes > 1 && data > 1)
    throw NotSupported(concat("nnodes=", nodes, " with data_parallel_size=", data,
                              ": replicas are of one process; run llmserve serve with its own "
                              "data_parallel_size on each node, behind llmserve route"));
  if (overlaps_halves && nodes > 1 && pipeline > 1)
    throw NotSupported(concat("enable_dbo with nnodes=", nodes,
                              " and pipeline_parallel_size=", pipeline,
                              ": stages exchange once a step, which half batches would "
                              "not hide; leave enable_dbo out, or use tensor_parallel_size"));
  for (int32_t i = 1; i < nodes; ++i)
    if (first_rank_of(i) % decode_context != 0)
      throw NotSupported(concat("decode_context_parallel_size=", decode_context,
                                " with nnodes=", nodes,
                                ": ranks that keep one KV cache read each other's keys and have to "
                                "be on one node, and node ",
                                i, " begins with rank ", first_rank_of(i),
                                "; use a size that divides the ranks of each node"));
  if (nodes > num_ranks())
    throw InvalidArgument(concat("nnodes=", nodes, " with ", num_ranks(),
                                 " ranks: each node has at least one; raise "
                                 "tensor_parallel_size or pipeline_parallel_size"));
}

void EngineConfig::validate() const {
  check_minimums(*this);
  parallel.validate();
  const bool is_host = device == "cpu" || device == "ref";
  if (parallel.decode_context > 1 && !is_host)
    throw NotSupported(concat("decode_context_parallel_size=", parallel.decode_context,
                              " on device '", device,
                              "': ranks of a CPU read each other's keys; "
                              "use device='cpu', or leave it at 1"));
  if (parallel.has_halves() && !is_host)
    throw NotSupported(concat("enable_dbo on device '", device,
                              "': half batches run on threads of a CPU; leave it out"));
  if (dtype != DType::kF32 && dtype != DType::kBF16) {
    throw InvalidArgument(concat("dtype must be float32 or bfloat16, got ", name(dtype)));
  }
  if (std::ranges::find(kKvCacheDTypes, kv_cache_dtype) == kKvCacheDTypes.end()) {
    throw InvalidArgument(
        concat("kv_cache_dtype must be float32, bfloat16 or fp8, got ", name(kv_cache_dtype)));
  }
  cache.validate();
  scheduler.validate();
  speculation.validate();
}

}  // namespace llmserve
