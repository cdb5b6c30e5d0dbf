// From what a user said to a complete EngineConfig: every setting that depends on the model or the
// machine gets its number before anything is loaded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "api/engine_config.h"
#include "io/checkpoint.h"
#include "models/model_config.h"

namespace llmserve {

// Settings as the user gave them; none means "choose for me". The names are those of the Python
// LLM.
struct ConfigRequest {
  std::string model;
  std::string device = "auto";
  std::string dtype = "auto";  // auto: as the checkpoint stores it (float16 runs as float32)
  std::string quantization;    // of linear layers; empty: none
  std::string kv_cache_dtype = "auto";   // auto: as dtype
  std::optional<int64_t> max_model_len;  // none: the model's maximum
  int32_t block_size = 16;
  bool enable_prefix_caching = true;
  std::optional<int64_t> kv_cache_memory_bytes;
  std::optional<int64_t> num_blocks;
  std::optional<double> memory_utilization;
  std::optional<int64_t> available_memory_bytes;  // none: what the machine has; to plan for another
  std::optional<int32_t> max_num_batched_tokens;
  std::optional<int32_t> max_num_seqs;
  std::optional<int32_t> max_num_queued_reqs;
  bool enable_chunked_prefill = true;
  int64_t max_stall_ms = 0;
  bool spreads_prompts = false;  // of batches that are waited for as a whole
  std::string policy = "fcfs";
  std::optional<int32_t> num_threads;
  uint64_t seed = 0;
  int32_t max_logprobs = 20;
  std::string packed_cache_folder;
  int64_t packed_cache_bytes = 0;
  std::vector<int32_t> eos_token_ids;
};

// Share of the available memory that weights, workspace and KV cache may take together on the CPU
// by default: the rest is for the page cache, the application and its neighbours.
inline constexpr double kDefaultCpuMemoryUtilization = 0.5;
// Of a device's own memory, which has no neighbours.
inline constexpr double kDefaultDeviceMemoryUtilization = 0.92;

// For read_model_config: 0 if none. Throws InvalidArgument on what is not positive.
int64_t check_max_model_len(const std::optional<int64_t>& max_model_len);

// Everything but the number of blocks, which takes a memory plan. Throws InvalidArgument,
// NotSupported.
EngineConfig resolve_settings(const ConfigRequest& request, const Checkpoint& checkpoint,
                              const ModelConfig& model);

// The complete config. The KV pool's size, in this order: num_blocks, kv_cache_memory_bytes, else
// what memory_utilization of the available memory leaves after weights and workspace, but no more
// than max_num_seqs sequences of max_model_len can fill. Throws InvalidArgument, NotSupported,
// CorruptFile, or ResourceExhausted with the arithmetic where it does not fit: see plan_memory.
EngineConfig resolve_config(const ConfigRequest& request);

}  // namespace llmserve
