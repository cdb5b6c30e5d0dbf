#include "io/bus_errors.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>

#include "core/error.h"

namespace llmserve {

// Read by the handler without a lock, so that nodes are reused and never freed. `begin` is written
// last and cleared first: a node with a beginning is whole.
struct BusErrorNode {
  std::atomic<uintptr_t> begin{0};  // 0: the node is free
  std::atomic<uintptr_t> end{0};
  std::atomic<ReadState*> state{nullptr};
  BusErrorNode* next = nullptr;
};

namespace {

static_assert(std::atomic<uintptr_t>::is_always_lock_free);
static_assert(std::atomic<ReadState*>::is_always_lock_free);

std::atomic<BusErrorNode*> g_nodes{nullptr};
std::mutex g_mutex;  // of all but the handler
struct sigaction g_previous{};
std::atomic<bool> g_has_passed_on{false};
uintptr_t g_page_bytes = 0;

bool fill_with_zeros(uintptr_t address) {
  for (BusErrorNode* node = g_nodes.load(); node; node = node->next) {
    const uintptr_t begin = node->begin.load();
    if (begin == 0 || address < begin || address >= node->end.load()) continue;
    const uintptr_t page = address / g_page_bytes * g_page_bytes;
    void* zeros = mmap(reinterpret_cast<void*>(page), node->end.load() - page, PROT_READ,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (zeros == MAP_FAILED) return false;
    node->state.load()->has_failed.store(true);
    return true;
  }
  return false;
}

// A fault that is not ours happens again when the handler returns, and then meets the handler of
// before; when even that hands it back (Python's faulthandler does), the default one.
void on_bus_error(int signal, siginfo_t* info, void*) {
  const int saved_errno = errno;
  if (!fill_with_zeros(reinterpret_cast<uintptr_t>(info->si_addr))) {
    struct sigaction next = g_previous;
    if (g_has_passed_on.exchange(true)) {
      next = {};
      next.sa_handler = SIG_DFL;
    }
    sigaction(signal, &next, nullptr);
  }
  errno = saved_errno;
}

// Again whenever somebody else's has taken its place.
void install_handler() {
  struct sigaction current{};
  sigaction(SIGBUS, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == &on_bus_error) return;
  g_page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  g_previous = current;
  struct sigaction ours{};
  ours.sa_sigaction = &on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

BusErrorNode* find_free_node() {
  for (BusErrorNode* node = g_nodes.load(); node; node = node->next)
    if (node->begin.load() == 0) return node;
  auto* node = new BusErrorNode;
  node->next = g_nodes.load();
  g_nodes.store(node);
  return node;
}

}  // namespace

void ReadState::check() const {
  if (has_failed.load(std::memory_order_relaxed))
    throw CorruptFile(concat(path,
                             ": was shortened or overwritten in place, or its disk failed, while "
                             "it was in use; put the file back, by a rename, and load the model "
                             "again"));
}

BusErrorGuard::BusErrorGuard(const std::byte* data, size_t num_bytes, ReadState& state) {
  const std::lock_guard lock(g_mutex);
  install_handler();
  const auto begin = reinterpret_cast<uintptr_t>(data);
  node_ = find_free_node();
  node_->state.store(&state);
  node_->end.store((begin + num_bytes + g_page_bytes - 1) / g_page_bytes * g_page_bytes);
  node_->begin.store(begin);
}

BusErrorGuard::~BusErrorGuard() {
  const std::lock_guard lock(g_mutex);
  node_->begin.store(0);
}

}  // namespace llmserve
