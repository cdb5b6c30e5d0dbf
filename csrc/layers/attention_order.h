// Where a step's rows run in parts, one of them ahead of the other.
#pragma once

#include "layers/forward_context.h"

namespace llmserve {

// What a part of a step exchanges through may be one, too: it says when keys and values of earlier
// rows have been stored.
class AttentionOrder {
 public:
  virtual ~AttentionOrder() = default;
  // Returns once the parts before this one have ended the layer's attention. Layers come in order.
  virtual void begin_attention() = 0;
  virtual void end_attention() = 0;

  // Null: all rows run at once.
  static AttentionOrder* of(const ForwardContext& context) {
    return dynamic_cast<AttentionOrder*>(&context.groups.tp);
  }
};

}  // namespace llmserve
