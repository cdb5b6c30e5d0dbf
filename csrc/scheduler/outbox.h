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
  // A new event of the sequence; valid until the next one. Made where it stays: one is made for
  // each token that is streamed, and it is large. Of a sequence that is not streamed it is the
  // last, and brings what was withheld.
  TokenEvent& add_event(Sequence& sequence);
  // Where the next token of a sequence goes: the event that it has already since the last take(), a
  // new one, or what is withheld until its end.
  TokenEvent& news_of(Sequence& sequence);
  // The last event of a sequence, whose news these are.
  TokenEvent& last_event(Sequence& sequence, TokenEvent& news) {
    return sequence.is_streamed ? news : add_event(sequence);
  }
  void add_progress(const TokenProgress& progress) { progress_.push_back(progress); }

  // Everything since the last call. Swapped into `result`, so that both keep their memory.
  void take(StepResult& result);
  // The result has been read: the memory of its events' tokens goes to later ones, of no more than
  // max_spare.
  void recycle(StepResult& result, size_t max_spare);

  // Asks for what num_events events and num_progress records will be written to.
  void prefetch(size_t num_events, size_t num_progress) const;

 private:
  std::vector<TokenEvent> events_;
  std::vector<TokenProgress> progress_;
  std::vector<std::vector<int32_t>> spare_token_ids_;  // of events that have been read; empty
};

}  // namespace llmserve
