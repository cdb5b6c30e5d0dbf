// Threads on cores of their own, on request: with LLMSERVE_PIN_THREADS=1 in the environment, thread
// i of an engine stays on the i-th physical core that the process may use, 0 being the engine's own
// and the others those of its pool. Off otherwise: where other programs or engines run, the system
// places threads better.
#pragma once

namespace llmserve {

// Pins the calling thread, if asked for and if there is such a core.
void pin_thread(int idx);
// Gives the calling thread, started by one that may be pinned, all CPUs of the process.
void unpin_thread();

}  // namespace llmserve
