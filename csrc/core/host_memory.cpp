#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "core/human_bytes.h"
#include "core/memory.h"
#include "core/system.h"

namespace llmserve {
namespace {

// 512 tokens of a layer with 4 heads of 64 in bfloat16: most first prompts. No more, since reads of
// scattered blocks take a third longer from small pages.
constexpr uintptr_t kMinSmallBytes = 256 << 10;
constexpr uintptr_t kLargePageBytes = 2 << 20;  // of x86-64, and of 64-bit Arm with pages of 4 KiB

// Pages of a mapping that nobody has touched, in bytes.
int64_t count_untouched(std::byte* data, int64_t num_bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  constexpr int64_t kPagesAtOnce = 1 << 18;
  std::vector<unsigned char> flags(
      static_cast<size_t>(std::min(kPagesAtOnce, num_bytes / page + 1)));
  int64_t untouched = 0;
  for (int64_t begin = 0; begin < num_bytes; begin += kPagesAtOnce * page) {
    const int64_t size = std::min(kPagesAtOnce * page, num_bytes - begin);
    if (mincore(data + begin, static_cast<size_t>(size), flags.data()) != 0) continue;
    const auto end = flags.begin() + (size + page - 1) / page;
    untouched += page * std::count_if(flags.begin(), end,
                                      [](unsigned char flag) { return (flag & 1) == 0; });
  }
  return untouched;
}

class HostMemory final : public Memory {
 public:
  bool is_host() const override { return true; }
  int64_t available_bytes() const override {
    return std::max<int64_t>(0,
                             read_memory_limits().available_bytes - allocations().untouched_bytes);
  }

  HostAllocations allocations() const {
    const std::lock_guard lock(mutex_);
    HostAllocations totals;
    for (const auto& [data, num_bytes] : sizes_) {
      totals.num_bytes += num_bytes;
      totals.untouched_bytes += count_untouched(data, num_bytes);
    }
    return totals;
  }

  std::byte* allocate(int64_t num_bytes) override {
    if (num_bytes == 0) return nullptr;
    void* mapped = num_bytes < 0
                       ? MAP_FAILED
                       : mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
      throw ResourceExhausted(concat("the system refused ", human_bytes(num_bytes),
                                     " of memory; use a smaller model, max_model_len or KV cache"));
    }
    // Large pages spare TLB misses on weights and cache; a hint only, ignored where not to be had.
    madvise(mapped, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);
    auto* const data = static_cast<std::byte*>(mapped);
    const std::lock_guard lock(mutex_);
    sizes_.emplace(data, num_bytes);
    return data;
  }
  void release(std::byte* data, int64_t num_bytes) noexcept override {
    // Under the lock, so that the address is not given out again while it is still in the list.
    const std::lock_guard lock(mutex_);
    sizes_.erase(data);
    munmap(data, static_cast<size_t>(num_bytes));
  }

  // Up to the first boundary of large pages that does not follow at once. A large page is cleared
  // whole when it is touched, and a virtual machine may have to ask its host for all of it: half a
  // second for one in each pool of a KV cache.
  void begin_small(std::byte* data, int64_t num_bytes) noexcept override {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<uintptr_t>(data);
    const uintptr_t begin = address / page * page;
    const uintptr_t end =
        std::min(address + static_cast<uintptr_t>(num_bytes),
                 ((address + kMinSmallBytes) / kLargePageBytes + 1) * kLargePageBytes);
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_NOHUGEPAGE);
  }

  bool touch(std::byte* data, int64_t num_bytes) noexcept override {
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of Linux 5.14, which old headers lack
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<uintptr_t>(data);
    const uintptr_t begin = address / page * page;
    return madvise(reinterpret_cast<void*>(begin),
                   address + static_cast<uintptr_t>(num_bytes) - begin, kPopulateWrite) == 0;
  }

  void copy_from_host(void* to, const void* from, int64_t num_bytes) override {
    if (num_bytes > 0) std::memcpy(to, from, static_cast<size_t>(num_bytes));
  }
  void copy_to_host(void* to, const void* from, int64_t num_bytes) override {
    copy_from_host(to, from, num_bytes);
  }
  void synchronize() override {}

 private:
  mutable std::mutex mutex_;
  std::map<std::byte*, int64_t> sizes_;  // of what is allocated
};

// Never destroyed: allocations may be released after the end of main().
HostMemory& the_host_memory() {
  static auto* const memory = new HostMemory;
  return *memory;
}

}  // namespace

Memory& host_memory() { return the_host_memory(); }

HostAllocations host_allocations() { return the_host_memory().allocations(); }

}  // namespace llmserve
