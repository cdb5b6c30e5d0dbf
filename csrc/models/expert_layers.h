// The layers of experts of a model that is loaded.
#pragma once

#include <vector>

#include "layers/expert_balancer.h"
#include "models/model.h"

namespace llmserve {

// In the order of the layers. Valid as long as the model is.
std::vector<RankExperts> rank_experts(const Model& model);

}  // namespace llmserve
