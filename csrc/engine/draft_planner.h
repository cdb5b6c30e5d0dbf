// What guesses beside a target, a model or a head: its settings, and what it takes but for its KV
// pool, which follows from the target's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "api/engine_config.h"
#include "engine/config_resolver.h"
#include "io/checkpoint.h"
#include "layers/weight_report.h"
#include "models/model_config.h"

namespace llmserve {

struct PlannedDraft {
  std::shared_ptr<const EngineConfig> config;  // null: nothing with weights guesses
  WeightReport weights;
  int64_t workspace_bytes = 0;  // but for what follows
  // [ranks] of the backend's own, for its largest step; what serves the target's serves it, too.
  std::vector<int64_t> scratch_bytes;
  std::vector<CacheGroupSpec> groups;  // of rows, with the KV heads that all ranks keep together
  std::string architecture;
  int32_t max_wanted_layers = 0;    // of the target's steps
  bool has_late_embedding = false;  // as EngineConfig has it
};

// Of `config`, the target's, as far as config.speculation has something with weights. Throws
// InvalidArgument, NotSupported and CorruptFile that name the field or the tensor.
PlannedDraft plan_draft(const ConfigRequest& request, const Checkpoint& target_checkpoint,
                        const ModelConfig& target, const EngineConfig& config);

}  // namespace llmserve
