// From what a user said to an EngineConfig: every setting that depends on the model or the machine
// gets its number, but for the KV pool, whose size takes a memory plan (memory_planner.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "api/engine_config.h"
#include "io/checkpoint.h"
#include "models/model_config.h"

namespace llmserve {

// What a caller of the Python LLM has said. None and "auto" mean "choose for me".
struct ConfigRequest {
  EngineConfig settings;  // what needs no choice, as it was said; the fields below come over it
  std::string model;
  std::string device = "auto";
  std::string dtype = "auto";  // auto: as the checkpoint stores it (float16 runs as float32)
  std::string kv_cache_dtype = "auto";   // auto: as dtype
  std::optional<int64_t> max_model_len;  // none: the model's maximum
  std::optional<int64_t> kv_cache_memory_bytes;
  std::optional<int64_t> num_blocks;
  std::optional<double> memory_utilization;
  std::optional<int64_t> available_memory_bytes;  // none: what the machine has; to plan for another
  std::optional<int32_t> max_num_batched_tokens;
  std::optional<int32_t> max_num_seqs;
  std::optional<int32_t> num_threads;
  bool spreads_prompts = false;  // of batches that are waited for as a whole

  static constexpr auto fields() {
    return std::tuple{
        ConfigField{"model", &ConfigRequest::model},
        ConfigField{"device", &ConfigRequest::device},
        ConfigField{"dtype", &ConfigRequest::dtype},
        ConfigField{"kv_cache_dtype", &ConfigRequest::kv_cache_dtype},
        ConfigField{"max_model_len", &ConfigRequest::max_model_len},
        ConfigField{"kv_cache_memory_bytes", &ConfigRequest::kv_cache_memory_bytes},
        ConfigField{"num_gpu_blocks_override", &ConfigRequest::num_blocks},
        ConfigField{"gpu_memory_utilization", &ConfigRequest::memory_utilization},
        ConfigField{"available_memory_bytes", &ConfigRequest::available_memory_bytes},
        ConfigField{"max_num_batched_tokens", &ConfigRequest::max_num_batched_tokens},
        ConfigField{"max_num_seqs", &ConfigRequest::max_num_seqs},
        ConfigField{"num_threads", &ConfigRequest::num_threads},
        ConfigField{"spreads_prompts", &ConfigRequest::spreads_prompts},
    };
  }
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

}  // namespace llmserve
