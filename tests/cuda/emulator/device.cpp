#include "device.h"
#include "act_together.h"
#include "async_copies.h"
#include "tensor_copies.h"

#ifndef __x86_64__
#include <ucontext.h>
#endif

#include "streams.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

// A test's: kernels that have run.
extern "C" {
__attribute__((visibility("default"))) std::atomic<int64_t> llmserve_emulator_num_kernels = 0;
}

namespace llmserve::cuda::emulator {

uint3 thread_idx;
uint3 block_idx;
dim3 block_dim;
dim3 grid_dim;
void* dynamic_shared;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kWarp = 32;

struct Barrier {
  int size = 0;
  int arrived = 0;
  int generation = 0;
};

// Where a fiber, or the loop that gives them their turns, goes on. A switch of the operating
// system's contexts asks the kernel for signal masks: where there is another way, it is some
// thirty times faster.
#if defined(__x86_64__)
using Context = void*;  // the stack's top, on which the registers that calls keep are

asm(R"(
  .pushsection .text
  .type llmserve_switch_fiber, @function
llmserve_switch_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size llmserve_switch_fiber, .-llmserve_switch_fiber
  .popsection
)");
extern "C" void llmserve_switch_fiber(void** from, void* to);

void make_context(Context& context, char* stack, void (*enter)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + kStackBytes) / 16 * 16;
  auto* words = reinterpret_cast<void**>(top) - 8;  // six registers, where to go on, no caller
  for (int i = 0; i < 8; ++i) words[i] = nullptr;
  words[6] = reinterpret_cast<void*>(enter);
  context = words;
}
void switch_context(Context& from, const Context& to) { llmserve_switch_fiber(&from, to); }
#else
using Context = ucontext_t;

void make_context(Context& context, char* stack, void (*enter)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
}
void switch_context(Context& from, const Context& to) { swapcontext(&from, &to); }
#endif

struct Fiber {
  Context context{};
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool is_done = false;
  const Barrier* waits_at = nullptr;  // until it has another generation than this one
  int generation = 0;
  const std::function<bool()>* waits_for = nullptr;
  bool is_patient = false;  // until none else can go on

  bool is_blocked() const {
    if (is_patient) return true;
    if (waits_for != nullptr) return !(*waits_for)();
    return waits_at != nullptr && waits_at->generation == generation;
  }
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  Barrier all;
  std::vector<Barrier> warps;
  Barrier
      some[16];  // of parts of the block, by their numbers; each arrival says of how many threads
  std::vector<uint64_t> lanes;  // what each thread shows to its warp
  std::vector<void*> operands;  // likewise
  int any = 0;
  Context scheduler{};
  int current = 0;
  const std::function<void()>* body = nullptr;
};

Block block;
std::mutex mutex;  // one kernel at a time: a kernel's shared memory is static

Fiber& current() { return *block.fibers[static_cast<size_t>(block.current)]; }

// Whether this arrival is the last one.
bool arrive_at(Barrier& barrier) {
  if (++barrier.arrived < barrier.size) return false;
  barrier.arrived = 0;
  ++barrier.generation;
  return true;
}

void wait(Barrier& barrier) {
  const int generation = barrier.generation;
  if (arrive_at(barrier)) return;
  Fiber& fiber = current();
  fiber.waits_at = &barrier;
  fiber.generation = generation;
  switch_context(fiber.context, block.scheduler);
  fiber.waits_at = nullptr;
}

void enter() {
  (*block.body)();
  current().is_done = true;
  switch_context(current().context, block.scheduler);
}

void start(int threads) {
  block.all = {threads, 0, 0};
  block.warps.assign(static_cast<size_t>((threads + kWarp - 1) / kWarp), {kWarp, 0, 0});
  block.lanes.assign(static_cast<size_t>(threads), 0);
  block.operands.assign(static_cast<size_t>(threads), nullptr);
  for (Barrier& barrier : block.some) barrier = {};
  clear_products(threads);
  while (std::ssize(block.fibers) < threads) block.fibers.push_back(std::make_unique<Fiber>());
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = *block.fibers[static_cast<size_t>(t)];
    fiber.is_done = false;
    fiber.waits_at = nullptr;
    fiber.waits_for = nullptr;
    fiber.is_patient = false;
    make_context(fiber.context, fiber.stack.get(), &enter);
  }
}

// Gives every fiber that can go on its turn until all are done, the first one first or the last
// one: nobody promised an order. A round in which none can is a barrier that some thread never
// comes to.
void run_block(int threads, bool is_reversed) {
  start(threads);
  for (int left = threads; left > 0;) {
    bool has_moved = false;
    for (int i = 0; i < threads; ++i) {
      const int t = is_reversed ? threads - 1 - i : i;
      Fiber& fiber = *block.fibers[static_cast<size_t>(t)];
      if (fiber.is_done || fiber.is_blocked()) continue;
      has_moved = true;
      block.current = t;
      thread_idx = {static_cast<unsigned>(t), 0, 0};
      switch_context(block.scheduler, fiber.context);
      if (fiber.is_done) --left;
    }
    if (has_moved) continue;
    bool is_any_patient = false;
    for (int t = 0; t < threads; ++t)
      is_any_patient |= std::exchange(block.fibers[static_cast<size_t>(t)]->is_patient, false);
    if (!is_any_patient)
      throw std::logic_error("threads wait at a barrier that others never come to");
  }
}

}  // namespace

void sync_threads() { wait(block.all); }

int sync_threads_or(int value) {
  wait(block.all);
  block.any = 0;
  wait(block.all);
  block.any |= value;
  wait(block.all);
  return block.any;
}

namespace {

Barrier& some_barrier(int number, int threads) {
  Barrier& barrier = block.some[number];
  if (number < 1 || number > 15 || threads % kWarp != 0 ||
      (barrier.arrived != 0 && barrier.size != threads))
    std::abort();  // as a GPU would
  barrier.size = threads;
  return barrier;
}

}  // namespace

void meet_some(int number, int threads) { wait(some_barrier(number, threads)); }
void arrive_some(int number, int threads) { arrive_at(some_barrier(number, threads)); }

void wait_until(const std::function<bool()>& condition) {
  if (condition()) return;
  Fiber& fiber = current();
  fiber.waits_for = &condition;
  switch_context(fiber.context, block.scheduler);
  fiber.waits_for = nullptr;
}

void wait_for_others() {
  current().is_patient = true;
  switch_context(current().context, block.scheduler);
}

uint64_t shuffle(uint64_t value, int from) {
  const int t = block.current;
  Barrier& warp = block.warps[static_cast<size_t>(t / kWarp)];
  block.lanes[static_cast<size_t>(t)] = value;
  wait(warp);
  const uint64_t other = block.lanes[static_cast<size_t>(t / kWarp * kWarp + from % kWarp)];
  wait(warp);
  return other;
}

uint64_t shuffle_xor(uint64_t value, int mask) {
  return shuffle(value, (block.current % kWarp) ^ mask);
}

void act_together(void* mine, void (*act)(void* const* lanes)) {
  const auto t = static_cast<size_t>(block.current);
  Barrier& warp = block.warps[t / kWarp];
  block.operands[t] = mine;
  if (warp.arrived + 1 == warp.size) act(&block.operands[t / kWarp * kWarp]);
  wait(warp);
}

namespace {

void run_grid(dim3 grid, int threads, size_t shared_bytes, const std::function<void()>& body) {
  ++llmserve_emulator_num_kernels;
  const std::lock_guard lock(mutex);
  std::vector<char> shared(shared_bytes + 16, '\x7f');  // not zero: nobody promised that
  dynamic_shared = shared.data();
  block.body = &body;
  block_dim = dim3(static_cast<unsigned>(threads));
  grid_dim = grid;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        block_idx = {x, y, z};
        clear_copies(threads, shared_bytes);
        clear_tensor_copies((x + y + z) / 2 % 2 == 0);
        run_block(threads, (x + y + z) % 2 == 1);
      }
}

}  // namespace

void run(dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
         std::function<void()> body) {
  if (threads % kWarp != 0 || threads < kWarp || threads > 1024 || grid.y > 65535 || grid.z > 65535)
    throw std::logic_error("a launch that CUDA would refuse");
  enqueue(stream, [=, body = std::move(body)] { run_grid(grid, threads, shared_bytes, body); });
}

}  // namespace llmserve::cuda::emulator
