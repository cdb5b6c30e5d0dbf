// News: what finishes beside the steps. A piece of news enters the scheduler as a record, between
// two steps and in any order. No other thread calls into the scheduler. News of a request that has
// ended, or of a sequence that has gone on without them, change nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "api/request.h"
#include "kv_cache/transfer.h"
#include "text/token_mask.h"

namespace llmserve {

// A drafter's guess of a sequence's next tokens, of a request that has_drafter.
struct DraftReady {
  RequestId request_id = 0;
  int32_t sample_index = 0;
  int64_t position = 0;  // of the first: the tokens that the drafter had seen
  std::vector<int32_t> token_ids;
  // Other guesses of the same places, each from the first place on: with token_ids the paths of a
  // tree.
  std::vector<std::vector<int32_t>> branches;
};

// All blocks of a transfer have arrived; or it failed, and some never will.
struct TransferDone {
  TransferId id = kNoTransfer;
};
struct TransferFailed {
  TransferId id = kNoTransfer;
};

// The grammar of a request that awaits_grammar; null: there is none, and `error` says why.
struct GrammarReady {
  RequestId request_id = 0;
  std::shared_ptr<TokenGrammar> grammar;
  std::string error;
};

// One of the masks that a sequence awaits is there. It may come before the commit of the step that
// the mask was too late for.
struct MaskReady {
  RequestId request_id = 0;
  int32_t sample_index = 0;
};

// A rank has gone and another takes its place, with an empty KV cache. The executor has abandoned
// its steps in flight.
struct RankLost {
  int32_t rank = 0;
};

using News =
    std::variant<DraftReady, TransferDone, TransferFailed, GrammarReady, MaskReady, RankLost>;
// Takes news from any thread.
using NewsSink = std::function<void(News)>;

}  // namespace llmserve
