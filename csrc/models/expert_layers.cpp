#include "models/expert_layers.h"

#include "layers/moe.h"
#include "models/decoder.h"

namespace llmserve {

std::vector<RankExperts> rank_experts(const Model& model) {
  std::vector<RankExperts> layers;
  for (const DecoderLayer& layer : dynamic_cast<const Decoder&>(model).layers())
    if (const auto* experts = dynamic_cast<const Experts*>(&layer.feed_forward()))
      layers.push_back(experts->rank_experts());
  return layers;
}

}  // namespace llmserve
