#include "device.h"

#include <ucontext.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

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

struct Fiber {
  ucontext_t context{};
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool is_done = false;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<uint64_t> lanes;  // what each thread shows to its warp
  int any = 0;
  ucontext_t scheduler{};
  int current = 0;
  const std::function<void()>* body = nullptr;
};

Block block;
std::mutex mutex;  // one kernel at a time: a kernel's shared memory is static

void yield() {
  swapcontext(&block.fibers[static_cast<size_t>(block.current)]->context, &block.scheduler);
}

void wait(Barrier& barrier) {
  const int generation = barrier.generation;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
}

void enter() {
  (*block.body)();
  Fiber& fiber = *block.fibers[static_cast<size_t>(block.current)];
  fiber.is_done = true;
  swapcontext(&fiber.context, &block.scheduler);
}

void start(int threads) {
  block.all = {threads, 0, 0};
  block.warps.assign(static_cast<size_t>((threads + kWarp - 1) / kWarp), {kWarp, 0, 0});
  block.lanes.assign(static_cast<size_t>(threads), 0);
  while (std::ssize(block.fibers) < threads) block.fibers.push_back(std::make_unique<Fiber>());
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = *block.fibers[static_cast<size_t>(t)];
    fiber.is_done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &enter, 0);
  }
}

// Gives every fiber its turn until all are done. A round in which nothing can move is a barrier
// that some thread never comes to.
void run_block(int threads) {
  start(threads);
  for (int left = threads; left > 0;) {
    left = 0;
    for (int t = 0; t < threads; ++t) {
      Fiber& fiber = *block.fibers[static_cast<size_t>(t)];
      if (fiber.is_done) continue;
      block.current = t;
      thread_idx = {static_cast<unsigned>(t), 0, 0};
      swapcontext(&block.scheduler, &fiber.context);
      if (!fiber.is_done) ++left;
    }
    if (left > 0 && left < threads && block.all.arrived == left)
      throw std::logic_error("threads wait at a barrier that others have left without");
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

uint64_t shuffle_xor(uint64_t value, int mask) {
  const int t = block.current;
  Barrier& warp = block.warps[static_cast<size_t>(t / kWarp)];
  block.lanes[static_cast<size_t>(t)] = value;
  wait(warp);
  const uint64_t other = block.lanes[static_cast<size_t>(t ^ mask)];
  wait(warp);
  return other;
}

void run(dim3 grid, int threads, size_t shared_bytes, cudaStream_t,
         const std::function<void()>& body) {
  if (threads % kWarp != 0 || threads < kWarp || threads > 1024 || grid.y > 65535 || grid.z > 65535)
    throw std::logic_error("a launch that CUDA would refuse");
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
        run_block(threads);
      }
}

}  // namespace llmserve::cuda::emulator
