// A kind of feed-forward layer for tests: the gated MLP as the sum of two halves, as two ranks that
// cut its inner width would have it.
#pragma once

#include "models/layer_kinds.h"

namespace llmserve {

extern const FeedForwardKind kSplitMlp;

}  // namespace llmserve
