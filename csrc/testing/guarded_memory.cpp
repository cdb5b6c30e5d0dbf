#include "testing/guarded_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "core/error.h"

namespace llmserve {
namespace {

int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

// Of the pages that hold so many bytes.
int64_t whole_pages(int64_t num_bytes) {
  return (num_bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

}  // namespace

std::byte* GuardedMemory::allocate(int64_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  const int64_t inner = whole_pages(num_bytes);
  const size_t whole = static_cast<size_t>(inner + 2 * page_bytes());
  void* begin = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) throw ResourceExhausted("no memory between guard pages");
  std::byte* pages = static_cast<std::byte*>(begin) + page_bytes();
  if (mprotect(pages, static_cast<size_t>(inner), PROT_READ | PROT_WRITE) != 0) {
    munmap(begin, whole);
    throw ResourceExhausted("no memory between guard pages");
  }
  return side_ == Side::kBegin ? pages : pages + inner - num_bytes;
}

void GuardedMemory::release(std::byte* data, int64_t num_bytes) noexcept {
  const int64_t inner = whole_pages(num_bytes);
  std::byte* pages = side_ == Side::kBegin ? data : data + num_bytes - inner;
  munmap(pages - page_bytes(), static_cast<size_t>(inner + 2 * page_bytes()));
}

void GuardedMemory::copy_from_host(void* to, const void* from, int64_t num_bytes) {
  if (num_bytes > 0) std::memcpy(to, from, static_cast<size_t>(num_bytes));
}

void GuardedMemory::copy_to_host(void* to, const void* from, int64_t num_bytes) {
  copy_from_host(to, from, num_bytes);
}

}  // namespace llmserve
