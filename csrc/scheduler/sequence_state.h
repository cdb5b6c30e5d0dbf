// The life of a sequence as one table: its states, what it owns in each, and which event moves it
// on. RequestBook applies it; nothing else changes a state.
//
//              admit                 hold                    finish
//   waiting ----------> running <-----------> held      any ---------> finished
//      |  ^               | ^        advance    |
//      |  +--- preempt ---+ |                   |
//      |  +--- preempt -----|-------------------+
//      |                    | loaded
//      +---- load ---> loading ---- load_failed ---> waiting
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace llmserve {

enum class SequenceState : uint8_t {
  kWaiting,  // in the queue
  kLoading,  // a transfer fills its blocks, from a lower tier or a peer
  kRunning,
  kHeld,  // a beam that has its candidates, and waits for the other beams of its request
  kFinished,
};
inline constexpr size_t kNumSequenceStates = 5;
std::string_view name(SequenceState state);

enum class SequenceEvent : uint8_t {
  kAdmit,       // schedule() gives it a seat and its first blocks; fork() does so for a child
  kLoad,        // likewise, and a lower tier or a peer has a prefix of it
  kLoaded,      // TransferDone
  kLoadFailed,  // TransferFailed: its blocks are gone, and it is computed instead
  kHold,        // commit(): its candidates are known
  kAdvance,     // commit(): the candidates of all beams are
  kPreempt,     // it gives blocks and seat back, and keeps its tokens
  kFinish,      // commit(), abort() or a failure
};
inline constexpr size_t kNumSequenceEvents = 8;
std::string_view name(SequenceEvent event);

// What a sequence owns in a state, beside its tokens.
struct SequenceStateRow {
  SequenceState state;
  std::string_view name;
  bool has_queue_place;  // in WaitingQueue
  bool has_seat;         // in RunningSet
  bool may_have_blocks;  // an ended one keeps them while a step in flight runs it
};
struct SequenceTransition {
  SequenceState from;
  SequenceEvent event;
  SequenceState to;
};

std::span<const SequenceStateRow> sequence_states();
std::span<const SequenceTransition> sequence_transitions();

const SequenceStateRow& row(SequenceState state);
// None: the event does not happen in this state.
std::optional<SequenceState> next_state(SequenceState state, SequenceEvent event);

}  // namespace llmserve
