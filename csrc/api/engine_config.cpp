#include "api/engine_config.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr std::array kKvCacheDTypes{DType::kF32, DType::kBF16, DType::kF8E4M3};

void require_at_least(const char* field, int64_t value, int64_t minimum) {
  if (value < minimum)
    throw InvalidArgument(concat(field, " must be at least ", minimum, ", got ", value));
}

}  // namespace

void CacheConfig::validate() const {
  require_at_least("block_size", block_size, 1);
  if (block_size > 256)
    throw InvalidArgument(concat("block_size must be at most 256, got ", block_size));
  require_at_least("num_blocks", num_blocks, 1);
  require_at_least("windows: groups", static_cast<int64_t>(windows.size()), 1);
  for (const int32_t window : windows) require_at_least("windows", window, 0);
}

void SchedulerConfig::validate() const {
  require_at_least("max_num_batched_tokens", max_num_batched_tokens, 1);
  require_at_least("max_num_seqs", max_num_seqs, 1);
  require_at_least("max_num_queued_reqs", max_num_queued_reqs, 0);
  require_at_least("max_model_len", max_model_len, 2);
  require_at_least("max_stall_us", max_stall_us, 0);
  require_at_least("min_spread_tokens", min_spread_tokens, 0);
  require_at_least("max_batch_delay_us", max_batch_delay_us, 0);
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

void EngineConfig::validate() const {
  require_at_least("num_threads", num_threads, 1);
  require_at_least("max_logprobs", max_logprobs, -1);
  if (dtype != DType::kF32 && dtype != DType::kBF16) {
    throw InvalidArgument(concat("dtype must be float32 or bfloat16, got ", name(dtype)));
  }
  if (std::ranges::find(kKvCacheDTypes, kv_cache_dtype) == kKvCacheDTypes.end()) {
    throw InvalidArgument(
        concat("kv_cache_dtype must be float32, bfloat16 or fp8, got ", name(kv_cache_dtype)));
  }
  cache.validate();
  scheduler.validate();
}

}  // namespace llmserve
