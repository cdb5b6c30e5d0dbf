// The search for bad values in weights.
#include <atomic>
#include <limits>

#include "core/error.h"
#include "kernels/cpu/cpu_backend.h"

namespace llmserve {
namespace {

// The first element of [begin, end) whose exponent bits are all ones, or end. Blocks are tested at
// memory speed; the tensor may be a mapped file, unaligned.
template <class Bits>
int64_t find_non_finite(bool (*any)(const void*, int64_t, Bits), const void* data, int64_t begin,
                        int64_t end, Bits exponent) {
  constexpr int64_t kBlock = 1 << 16;  // at most so many are looked at one by one, once
  const auto* bytes = static_cast<const std::byte*>(data);
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    if (!any(bytes + at * static_cast<int64_t>(sizeof(Bits)), count, exponent)) continue;
    for (int64_t i = at; i < at + count; ++i)
      if (any(bytes + i * static_cast<int64_t>(sizeof(Bits)), 1, exponent)) return i;
  }
  return end;
}

}  // namespace

int64_t CpuBackend::first_non_finite(const ConstTensor& tensor) {
  if (!tensor.is_contiguous())
    throw InvalidArgument("first_non_finite.tensor: expected a contiguous tensor");
  const int64_t none = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> first{none};
  workers_.pool().parallel_for(
      tensor.num_elements(), 1 << 16, [&](int64_t begin, int64_t end, int) {
        int64_t found = end;
        if (tensor.dtype == DType::kF32)
          found = find_non_finite<uint32_t>(workers_.kernels().any_non_finite_32, tensor.data,
                                            begin, end, 0x7f800000u);
        else
          found =
              find_non_finite<uint16_t>(workers_.kernels().any_non_finite_16, tensor.data, begin,
                                        end, tensor.dtype == DType::kBF16 ? 0x7f80 : 0x7c00);
        if (found == end) return;
        int64_t known = first.load();
        while (found < known && !first.compare_exchange_weak(known, found)) {
        }
      });
  return first == none ? -1 : first.load();
}

}  // namespace llmserve
