// cp.async by the PTX ISA: what is copied is there once its thread has waited for it, and not
// before, or with LLMSERVE_EMULATOR_COPIES=early at once: nobody promised either. The async proxy
// sees it after fence.proxy.async of that thread.
#include "async_copies.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "device.h"

namespace llmserve::cuda::emulator {
namespace {

// Where dynamic shared memory begins is a multiple of 16 and of no more.
constexpr uint32_t kBegin = 0x410;
constexpr int kMaxThreads = 1024;
constexpr int kPiece = 16;  // bytes

struct Copy {
  std::byte* to;
  const std::byte* from;  // null: zeros
};

struct Thread {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

Thread threads[kMaxThreads];
// Which thread copied a piece of dynamic shared memory and has not shown it, plus one.
std::vector<uint16_t> hidden;
size_t num_bytes = 0;
bool is_early = false;

std::byte* base() { return static_cast<std::byte*>(dynamic_shared); }

void perform(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    if (copy.from == nullptr)
      std::memset(copy.to, 0, kPiece);
    else
      std::memcpy(copy.to, copy.from, kPiece);
    if (copy.to >= base() && copy.to < base() + num_bytes)
      hidden[static_cast<size_t>(copy.to - base()) / kPiece] =
          static_cast<uint16_t>(thread_idx.x + 1);
  }
}

Thread& mine() { return threads[thread_idx.x]; }

}  // namespace

void clear_copies(int num_threads, size_t shared_bytes) {
  for (int t = 0; t < num_threads; ++t) {
    threads[t].open.clear();
    threads[t].groups.clear();
  }
  num_bytes = shared_bytes;
  const char* text = std::getenv("LLMSERVE_EMULATOR_COPIES");
  is_early = text != nullptr && std::strcmp(text, "early") == 0;
  hidden.assign(shared_bytes / kPiece + 1, 0);
}

void copy_async(void* to, const void* from, bool is_there) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % kPiece != 0)
    std::abort();  // as a GPU would
  const Copy copy{static_cast<std::byte*>(to),
                  is_there ? static_cast<const std::byte*>(from) : nullptr};
  if (is_early)
    perform({copy});
  else
    mine().open.push_back(copy);
}

void commit_copies() {
  mine().groups.push_back(std::move(mine().open));
  mine().open.clear();
}

void wait_for_copies(int num_groups) {
  Thread& thread = mine();
  for (; std::ssize(thread.groups) > num_groups; thread.groups.pop_front())
    perform(thread.groups.front());
}

void wait_for_copies() {
  commit_copies();
  wait_for_copies(0);
}

void show_to_products() {
  std::replace(hidden.begin(), hidden.end(), static_cast<uint16_t>(thread_idx.x + 1), uint16_t{0});
}

uint32_t shared_address(const void* data) {
  return static_cast<uint32_t>(static_cast<const std::byte*>(data) - base()) + kBegin;
}

void read_shared(uint32_t address, uint16_t (&to)[8]) {
  const size_t at = address - kBegin;
  if (address < kBegin || at + sizeof to > num_bytes || hidden[at / kPiece] != 0) {
    std::fprintf(stderr, "shared memory at %u of %zu bytes is read by a product, %s\n", address,
                 num_bytes,
                 at + sizeof to > num_bytes ? "which has no more" : "to which it was not shown");
    std::abort();
  }
  std::memcpy(to, base() + at, sizeof to);
}

}  // namespace llmserve::cuda::emulator
