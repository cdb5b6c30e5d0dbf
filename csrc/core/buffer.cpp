#include "core/buffer.h"

#include <sys/mman.h>

#include "core/error.h"

namespace llmserve {

Buffer::Buffer(int64_t num_bytes) : num_bytes_(num_bytes) {
  if (num_bytes == 0) return;
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
  data_ = static_cast<std::byte*>(mapped);
}

Buffer::~Buffer() {
  if (data_) munmap(data_, static_cast<size_t>(num_bytes_));
}

}  // namespace llmserve
