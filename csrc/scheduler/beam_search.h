// Beam search. The beams of a request are sequences that share blocks. Each runs when there is room
// for it, and then holds the candidates for its next token until the others are as far; what the
// best of them give replaces them all.
//
// As vLLM does it: a beam proposes its 2 * beam_width most likely tokens; those that end the text
// are set aside, and the best beam_width of the others go on. At the end all are ranked. The score
// is cumulative logprob / tokens^length_penalty, where the prompt counts and an end-of-sequence
// token does not.
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

  // A beam's candidates, best first; none: its logits were not finite.
  void hold(Sequence& sequence, std::span<const TokenLogprob> candidates);
  // At the end of a commit: the requests whose beams all have theirs go on, or end. Returns how
  // many tokens they got.
  int64_t advance(int64_t now_us);
  // The commit was cut off.
  void clear() { complete_.clear(); }

 private:
  int64_t advance(RequestEntry& entry, int64_t now_us);
  void replace(RequestEntry& entry, const std::vector<BeamExtension>& extensions, int64_t now_us);
  void finish(RequestEntry& entry, const std::vector<BeamExtension>& extensions, int64_t now_us);

  const SchedulerConfig& config_;
  const RequestAdmission& admission_;
  RequestBook& book_;
  Outbox& outbox_;
  std::vector<RequestEntry*> complete_;  // of the commit under way: all have their candidates
};

}  // namespace llmserve
