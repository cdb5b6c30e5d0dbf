// What every architecture's file provides; registry.cpp has their rows. An architecture that the
// shared skeleton (decoder.h) does not fit brings a build function of its own.
#pragma once

#include "io/json.h"
#include "models/model_config.h"

namespace llmserve {

void configure_arcee(const JsonNode& json, ModelConfig& config);
void configure_cohere(const JsonNode& json, ModelConfig& config);
void configure_cohere2(const JsonNode& json, ModelConfig& config);
void configure_ernie4_5(const JsonNode& json, ModelConfig& config);
void configure_exaone4(const JsonNode& json, ModelConfig& config);
void configure_falcon(const JsonNode& json, ModelConfig& config);
void configure_gemma(const JsonNode& json, ModelConfig& config);
void configure_gemma2(const JsonNode& json, ModelConfig& config);
void configure_gemma3(const JsonNode& json, ModelConfig& config);
void configure_glm(const JsonNode& json, ModelConfig& config);
void configure_glm4(const JsonNode& json, ModelConfig& config);
void configure_gpt2(const JsonNode& json, ModelConfig& config);
void configure_gpt_bigcode(const JsonNode& json, ModelConfig& config);
void configure_gptj(const JsonNode& json, ModelConfig& config);
void configure_gpt_neox(const JsonNode& json, ModelConfig& config);
void configure_granite(const JsonNode& json, ModelConfig& config);
void configure_helium(const JsonNode& json, ModelConfig& config);
void configure_hunyuan_v1_dense(const JsonNode& json, ModelConfig& config);
void configure_llama(const JsonNode& json, ModelConfig& config);
void configure_ministral(const JsonNode& json, ModelConfig& config);
void configure_ministral3(const JsonNode& json, ModelConfig& config);
void configure_mistral(const JsonNode& json, ModelConfig& config);
void configure_nemotron(const JsonNode& json, ModelConfig& config);
void configure_olmo2(const JsonNode& json, ModelConfig& config);
void configure_olmo3(const JsonNode& json, ModelConfig& config);
void configure_opt(const JsonNode& json, ModelConfig& config);
void configure_persimmon(const JsonNode& json, ModelConfig& config);
void configure_phi(const JsonNode& json, ModelConfig& config);
void configure_phi3(const JsonNode& json, ModelConfig& config);
void configure_qwen2(const JsonNode& json, ModelConfig& config);
void configure_qwen3(const JsonNode& json, ModelConfig& config);
void configure_seed_oss(const JsonNode& json, ModelConfig& config);
void configure_smollm3(const JsonNode& json, ModelConfig& config);
void configure_stablelm(const JsonNode& json, ModelConfig& config);
void configure_starcoder2(const JsonNode& json, ModelConfig& config);

}  // namespace llmserve
