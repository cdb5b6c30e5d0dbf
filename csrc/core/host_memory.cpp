#include <sys/mman.h>

#include <cstring>

#include "core/error.h"
#include "core/memory.h"
#include "core/system.h"

namespace llmserve {
namespace {

class HostMemory final : public Memory {
 public:
  bool is_host() const override { return true; }
  int64_t available_bytes() const override { return available_memory_bytes(); }

  std::byte* allocate(int64_t num_bytes) override {
    if (num_bytes == 0) return nullptr;
    void* mapped = num_bytes < 0
                       ? MAP_FAILED
                       : mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
      throw ResourceExhausted(
          concat("the system refused ", num_bytes,
                 " bytes of memory; use a smaller model, max_model_len or KV cache"));
    }
    // Large pages spare TLB misses on weights and cache; a hint only, ignored where not to be had.
    madvise(mapped, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);
    return static_cast<std::byte*>(mapped);
  }
  void release(std::byte* data, int64_t num_bytes) noexcept override {
    munmap(data, static_cast<size_t>(num_bytes));
  }

  void copy_from_host(void* to, const void* from, int64_t num_bytes) override {
    if (num_bytes > 0) std::memcpy(to, from, static_cast<size_t>(num_bytes));
  }
  void copy_to_host(void* to, const void* from, int64_t num_bytes) override {
    copy_from_host(to, from, num_bytes);
  }
  void synchronize() override {}
};

}  // namespace

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace llmserve
