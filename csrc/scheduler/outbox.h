// What the scheduler has to give out: events for the reader, progress for the engine's books.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "scheduler/sequence.h"
#include "scheduler/step_plan.h"

namespace llmserve {

class Outbox {
 public:
  // A new event of the sequence, valid until the next one is added. A sequence that is not streamed
  // has this one event, which brings all that was withheld. An event is built in place: it is
  // large, and each streamed token has one.
  TokenEvent& add_event(Sequence& sequence);
  // The event that takes the sequence's next token: the one that it has since the last take(), a
  // new one, or the one that is withheld until its end.
  TokenEvent& news_of(Sequence& sequence);
  // The last event of a sequence, where `news` is what news_of() gave.
  TokenEvent& last_event(Sequence& sequence, TokenEvent& news) {
    return sequence.is_streamed ? news : add_event(sequence);
  }
  void add_progress(const TokenProgress& progress) { progress_.push_back(progress); }

  void add_drafts(const DraftOutcome& outcome) { drafts_.push_back(outcome); }

  // Gives everything since the last call. Vectors are swapped, so that both sides keep their
  // memory.
  void take(StepResult& result);
  // Keeps the memory of a read result's token ids for later events, of max_spare events at most.
  void recycle(StepResult& result, size_t max_spare);

  // Prefetches the memory of the next num_events events and num_progress records.
  void prefetch(size_t num_events, size_t num_progress) const;

 private:
  std::vector<TokenEvent> events_;
  std::vector<TokenProgress> progress_;
  std::vector<DraftOutcome> drafts_;
  std::vector<std::vector<int32_t>> spare_token_ids_;  // of events that have been read; empty
};

}  // namespace llmserve
