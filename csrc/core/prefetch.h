// Asks for memory before it is needed. Between two steps nothing of the engine's books is in the
// caches, since the forward has swept them: what a loop will touch is asked for first, all rows at
// once, so that their misses overlap instead of following one another.
#pragma once

#include <cstddef>

namespace llmserve {

inline constexpr size_t kCacheLineBytes = 64;

// The lines of [data, data + num_bytes), to be written soon. Any address is fine: nothing is read.
inline void prefetch(const void* data, size_t num_bytes) {
  for (size_t at = 0; at < num_bytes; at += kCacheLineBytes)
    __builtin_prefetch(static_cast<const char*>(data) + at, /*rw=*/1);
  // Else gcc takes a function that does nothing but this for one without effects, and drops its
  // calls.
  asm volatile("");
}

template <class T>
void prefetch(const T& object) {
  prefetch(&object, sizeof(T));
}

}  // namespace llmserve
