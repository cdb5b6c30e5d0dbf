#include "models/draft_heads/registry.h"

#include <utility>

#include "core/error.h"
#include "models/draft_heads/eagle3_head.h"
#include "models/draft_heads/eagle_head.h"
#include "models/draft_heads/medusa_head.h"

namespace llmserve {

std::unique_ptr<DraftHead> make_draft_head(HeadConfig config, WeightLoader& weights) {
  switch (config.kind) {
    case HeadKind::kEagle3:
      return std::make_unique<Eagle3Head>(std::move(config), weights);
    case HeadKind::kEagle:
    case HeadKind::kMtp:
      return std::make_unique<EagleHead>(std::move(config), weights);
    case HeadKind::kMedusa:
      return std::make_unique<MedusaHead>(std::move(config), weights);
  }
  throw InternalError("a kind of head");
}

}  // namespace llmserve
