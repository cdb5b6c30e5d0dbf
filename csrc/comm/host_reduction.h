// The reductions of communicators in host memory.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "comm/communicator.h"

namespace llmserve {

// Elements that are reduced at a time: 1 KiB of sums stays in the first level cache, and ranks
// write to lines of their own.
inline constexpr int64_t kReducedAtOnce = 256;

// Reduces elements [begin, begin + count) of the ranks' data of float32, bfloat16 or float16, in
// the order of the ranks, in float32, and rounds once; or of int32. Each block of the result, of up
// to kReducedAtOnce elements, goes to put(results, elements done before, elements). A maximum with
// a NaN is NaN.
void reduce_in_order(
    std::span<const void* const> data, DType dtype, Reduction reduction, int64_t begin,
    int64_t count,
    const std::function<void(const void* results, int64_t done, int64_t count)>& put);

}  // namespace llmserve
