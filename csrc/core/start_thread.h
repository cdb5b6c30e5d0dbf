// Threads that may not be had: a limit on processes or memory is the user's to raise.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"

namespace llmserve {

// A thread that runs `fn`. Throws ResourceExhausted where the system does not give one.
template <class Fn>
std::thread start_thread(Fn&& fn) {
  try {
    return std::thread(std::forward<Fn>(fn));
  } catch (const std::system_error& error) {
    throw ResourceExhausted(concat("a thread could not be started (", error.code().message(),
                                   "); lower num_threads, or raise the limits on processes "
                                   "(ulimit -u, the container's pids) and on memory"));
  }
}

}  // namespace llmserve
