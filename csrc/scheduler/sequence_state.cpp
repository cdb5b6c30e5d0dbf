#include "scheduler/sequence_state.h"

#include <array>

namespace llmserve {
namespace {

using State = SequenceState;
using Event = SequenceEvent;

constexpr std::array<SequenceStateRow, kNumSequenceStates> kStates{{
    {State::kWaiting, "waiting", true, false, false},
    {State::kLoading, "loading", false, true, true},
    {State::kRunning, "running", false, true, true},
    {State::kHeld, "held", false, true, true},
    {State::kFinished, "finished", false, false, true},
}};

constexpr std::array<std::string_view, kNumSequenceEvents> kEventNames{
    "admit", "load", "loaded", "load_failed", "hold", "advance", "preempt", "finish"};

constexpr std::array<SequenceTransition, 12> kTransitions{{
    {State::kWaiting, Event::kAdmit, State::kRunning},
    {State::kWaiting, Event::kLoad, State::kLoading},
    {State::kWaiting, Event::kFinish, State::kFinished},
    {State::kLoading, Event::kLoaded, State::kRunning},
    {State::kLoading, Event::kLoadFailed, State::kWaiting},
    {State::kLoading, Event::kFinish, State::kFinished},
    {State::kRunning, Event::kHold, State::kHeld},
    {State::kRunning, Event::kPreempt, State::kWaiting},
    {State::kRunning, Event::kFinish, State::kFinished},
    {State::kHeld, Event::kAdvance, State::kRunning},
    {State::kHeld, Event::kPreempt, State::kWaiting},
    {State::kHeld, Event::kFinish, State::kFinished},
}};

// [state][event], kNone where the event does not happen.
constexpr uint8_t kNone = 0xff;
constexpr auto kNext = [] {
  std::array<std::array<uint8_t, kNumSequenceEvents>, kNumSequenceStates> next{};
  for (auto& row : next) row.fill(kNone);
  for (const SequenceTransition& t : kTransitions)
    next[static_cast<size_t>(t.from)][static_cast<size_t>(t.event)] = static_cast<uint8_t>(t.to);
  return next;
}();

}  // namespace

std::span<const SequenceStateRow> sequence_states() { return kStates; }
std::span<const SequenceTransition> sequence_transitions() { return kTransitions; }

const SequenceStateRow& row(SequenceState state) { return kStates[static_cast<size_t>(state)]; }
std::string_view name(SequenceState state) { return row(state).name; }
std::string_view name(SequenceEvent event) { return kEventNames[static_cast<size_t>(event)]; }

std::optional<SequenceState> next_state(SequenceState state, SequenceEvent event) {
  const uint8_t next = kNext[static_cast<size_t>(state)][static_cast<size_t>(event)];
  if (next == kNone) return std::nullopt;
  return static_cast<SequenceState>(next);
}

}  // namespace llmserve
