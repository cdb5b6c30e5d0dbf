// Where threads run. On cores of their own, on request: with LLMSERVE_PIN_THREADS=1 in the
// environment, thread i of an engine stays on the i-th physical core that the process may use, 0
// being the engine's own and the others those of its pool. Off otherwise: where other programs or
// engines run, the system places threads better.
#pragma once

#include <cstdint>

namespace llmserve {

// Pins the calling thread to the idx-th of the physical cores that it may use, if asked for and if
// there is such a core.
void pin_thread(int idx);
// Likewise to `count` cores from the first-th on, where it and the threads that it starts stay: for
// the ranks of an engine, each of which pins within its own.
void pin_thread_to(int first, int count);
// Gives the calling thread, started by one that may be pinned, all CPUs of the process.
void unpin_thread();
// The system's number of the calling thread.
int64_t current_thread_id();
// Has a thread of this process run mostly where others leave a core idle, for good.
void lower_priority(int64_t thread_id);

}  // namespace llmserve
