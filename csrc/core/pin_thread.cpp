#include "core/pin_thread.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>
#include <vector>

#include "core/system.h"

namespace llmserve {
namespace {

bool is_asked_for() {
  const char* value = std::getenv("LLMSERVE_PIN_THREADS");
  return value != nullptr && std::string_view(value) == "1";
}

}  // namespace

void pin_thread(int idx) {
  if (!is_asked_for()) return;
  cpu_set_t own;
  CPU_ZERO(&own);
  if (sched_getaffinity(0, sizeof(own), &own) != 0) return;
  std::vector<int> cores = physical_cores();
  std::erase_if(cores, [&](int core) { return !CPU_ISSET(static_cast<size_t>(core), &own); });
  if (static_cast<size_t>(idx) >= cores.size()) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(cores[static_cast<size_t>(idx)]), &one);
  sched_setaffinity(0, sizeof(one), &one);  // where it is refused, the thread stays where it was
}

void pin_thread_to(int first, int count) {
  if (!is_asked_for()) return;
  const std::vector<int> cores = physical_cores();
  if (static_cast<size_t>(first + count) > cores.size()) return;
  cpu_set_t share;
  CPU_ZERO(&share);
  for (int i = first; i < first + count; ++i)
    CPU_SET(static_cast<size_t>(cores[static_cast<size_t>(i)]), &share);
  sched_setaffinity(0, sizeof(share), &share);
}

void unpin_thread() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (is_asked_for() && sched_getaffinity(getpid(), sizeof(allowed), &allowed) == 0)
    sched_setaffinity(0, sizeof(allowed), &allowed);
}

int64_t current_thread_id() { return gettid(); }

// On Linux the niceness is a thread's own. A tenth of a core is left where all are busy.
void lower_priority(int64_t thread_id) {
  setpriority(PRIO_PROCESS, static_cast<id_t>(thread_id), 10);
}

}  // namespace llmserve
