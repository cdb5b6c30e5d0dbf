// Barriers in shared memory, by the PTX ISA, "mbarrier": a phase ends when all have arrived and,
// where bytes are waited for, these have been copied.
#include "phases.h"

#include <cstdio>
#include <cstdlib>

#include "device.h"
#include "tensor_copies.h"

namespace llmserve::cuda::emulator {
namespace {

// How a barrier's 8 bytes are used is nobody's business but its own.
struct PhaseBits {
  uint8_t count;
  uint8_t missing;
  uint16_t phase;
  int32_t bytes;  // that the phase still waits for: below zero where they came first
};
static_assert(sizeof(PhaseBits) == sizeof(uint64_t));

PhaseBits load(const uint64_t* barrier) { return __builtin_bit_cast(PhaseBits, *barrier); }

void store(uint64_t* barrier, PhaseBits bits) {
  if (bits.missing == 0 && bits.bytes == 0) {
    bits.missing = bits.count;
    ++bits.phase;
  }
  *barrier = __builtin_bit_cast(uint64_t, bits);
}

}  // namespace

void init_phases(uint64_t* barrier, int count) {
  if (count < 1 || count > 255) std::abort();  // of this kind
  const auto all = static_cast<uint8_t>(count);
  *barrier = __builtin_bit_cast(uint64_t, PhaseBits{all, all, 0, 0});
}

void arrive(uint64_t* barrier) { arrive_with_bytes(barrier, 0); }

void arrive_with_bytes(uint64_t* barrier, int num_bytes) {
  PhaseBits bits = load(barrier);
  if (bits.missing == 0) {
    std::fprintf(stderr, "a barrier: more arrive than a phase has\n");
    std::abort();
  }
  --bits.missing;
  bits.bytes += num_bytes;
  store(barrier, bits);
}

void count_bytes(uint64_t* barrier, int num_bytes) {
  PhaseBits bits = load(barrier);
  bits.bytes -= num_bytes;
  store(barrier, bits);
}

void await_phase(uint64_t* barrier, int parity) {
  const std::function<bool()> has_ended = [=] {
    if (load(barrier).missing == 0) land_copies(barrier);
    return static_cast<int>(load(barrier).phase % 2) != parity;
  };
  wait_until(has_ended);
}

}  // namespace llmserve::cuda::emulator
