// What every architecture's file provides; registry.cpp has their rows. An architecture that the
// shared skeleton (decoder.h) does not fit brings a build function of its own.
#pragma once

#include "io/json.h"
#include "models/model_config.h"

namespace llmserve {

void configure_llama(const JsonNode& json, ModelConfig& config);
void configure_mistral(const JsonNode& json, ModelConfig& config);
void configure_qwen2(const JsonNode& json, ModelConfig& config);
void configure_qwen3(const JsonNode& json, ModelConfig& config);

}  // namespace llmserve
