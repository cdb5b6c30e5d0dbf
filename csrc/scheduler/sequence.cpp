#include "scheduler/sequence.h"

namespace llmserve {

std::string_view name(SequenceState state) {
  switch (state) {
    case SequenceState::kWaiting:
      return "waiting";
    case SequenceState::kRunning:
      return "running";
    case SequenceState::kFinished:
      return "finished";
  }
  return "unknown";
}

}  // namespace llmserve
