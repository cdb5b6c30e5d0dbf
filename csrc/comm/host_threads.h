// Threads of a rank for large copies in host memory.
#pragma once

#include <cstdint>
#include <functional>

namespace llmserve {

// Calls work(begin, end) for ranges of [0, count) on several threads, and returns when all are
// done.
using HostThreads =
    std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& work)>;

}  // namespace llmserve
