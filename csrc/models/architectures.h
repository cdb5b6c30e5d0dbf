// What every architecture's file provides: a configure function, declared by its row.
#pragma once

#include "io/json.h"
#include "models/config_fields.h"
#include "models/model_config.h"

namespace llmserve {

#define LLMSERVE_ARCHITECTURE(name, model_type, summary, configure) \
  void configure(const JsonNode& json, ModelConfig& config);
#include "models/architectures.inc"

}  // namespace llmserve
