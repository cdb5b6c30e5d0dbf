// What the processes that run one model have alike, as text that they compare.
#pragma once

#include <string>

#include "api/engine_config.h"
#include "io/checkpoint.h"

namespace llmserve {

// Lines of name=value: all that decides the numbers and the shape of a step. Build, instruction
// set, dtypes, sizes, cuts, the checkpoint's description and a sample of its weights, as whole
// checkpoints take too long to read. Two nodes with the same lines give a model the same bits.
std::string node_settings(const EngineConfig& config, const Checkpoint& checkpoint);

// "dtype is bfloat16 there and float32 here; …"; empty: they are alike.
std::string describe_difference(const std::string& there, const std::string& here);

// What rank 0's process decides for all, and others take over: the size of the KV cache.
std::string decided_settings(const EngineConfig& config);
// Of it. Throws DeviceError for what is none.
int32_t read_decided_blocks(const std::string& text);

}  // namespace llmserve
