// What a thread does between two looks at what it waits for.
#pragma once

#include <thread>

namespace llmserve {

// 20 to 50 ns, in which a core's other thread has the core.
inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace llmserve
