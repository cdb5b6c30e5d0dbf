// The kinds of heads that draft for a model.
#pragma once

#include <memory>

#include "models/draft_heads/draft_head.h"

namespace llmserve {

class WeightLoader;

// Plans or loads, as the loader does. Throws CorruptFile.
std::unique_ptr<DraftHead> make_draft_head(HeadConfig config, WeightLoader& weights);

}  // namespace llmserve
