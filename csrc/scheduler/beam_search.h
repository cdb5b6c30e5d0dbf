// Beam search. The beams of a request are sequences that share blocks. Each beam runs when there is
// room for it. It then holds the candidates for its next token until the other beams have theirs.
// The best extensions of all beams replace the beams.
//
// The search is vLLM's. A beam proposes its 2 * beam_width most likely tokens. Tokens that end the
// text are set aside, and the best beam_width of the others go on. At the end all are ranked. The
// score is cumulative logprob / tokens^length_penalty. The prompt's tokens count, an
// end-of-sequence token does not.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "api/engine_config.h"
#include "scheduler/admission.h"
#include "scheduler/beam.h"
#include "scheduler/outbox.h"
#include "scheduler/request_book.h"

namespace llmserve {

class BeamSearch {
 public:
  // All outlive it.
  BeamSearch(const SchedulerConfig& config, const RequestAdmission& admission, RequestBook& book,
             Outbox& outbox)
      : config_(config), admission_(admission), book_(book), outbox_(outbox) {}

  // Keeps a beam's candidates, best first. None: its logits were not finite, and it ends.
  void hold(Sequence& sequence, std::span<const TokenLogprob> candidates);
  // At the end of a commit: a request goes on, or ends, once all of its beams have candidates.
  // Returns how many tokens these requests got.
  int64_t advance(int64_t now_us);
  // Forgets a commit that was cut off.
  void clear() { complete_.clear(); }

 private:
  int64_t advance(RequestEntry& entry, int64_t now_us);
  void replace(RequestEntry& entry, const std::vector<BeamExtension>& extensions, int64_t now_us);
  void finish(RequestEntry& entry, const std::vector<BeamExtension>& extensions, int64_t now_us);

  const SchedulerConfig& config_;
  const RequestAdmission& admission_;
  RequestBook& book_;
  Outbox& outbox_;
  // Requests of the current commit whose beams all have candidates.
  std::vector<RequestEntry*> complete_;
};

}  // namespace llmserve
