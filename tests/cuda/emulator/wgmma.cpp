// Products of warpgroups and barriers in shared memory, by the PTX ISA: "Asynchronous warpgroup
// level matrix instructions", "mbarrier", "bar". A mistake that a GPU would answer with wrong
// numbers or a hang ends the process here and says what it was:
//   - a product's operand changes between the call and the wait for its group, in shared memory or
//     in registers, or was copied there and not shown to the async proxy
//   - accumulators are read, which are NaN meanwhile, or written before that wait
//   - registers are not settled between a wait, from which on they may be touched, and a product
// A warp computes its 16 rows by itself, as the warps of a warpgroup need not come together.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "act_together.h"
#include "async_copies.h"
#include "device.h"
#include "fragments.h"

namespace llmserve::cuda::emulator {
namespace {

constexpr int kLanes = 32;
constexpr int kDepth = 16;
constexpr uint32_t kInFlight = 0x7fc0dead;  // what accumulators hold meanwhile: a NaN

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "wgmma, emulated: %s\n", what);
  std::abort();
}

// What a descriptor of 128-byte swizzling names: "Matrix Descriptor Format" and, for the strides,
// "Strides" and "Canonical Layouts".
struct Matrix {
  uint32_t start;
  uint32_t leading;
  uint32_t stride;

  explicit Matrix(uint64_t descriptor)
      : start(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        leading(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) fail("only 128-byte swizzling is emulated");
    if ((descriptor >> 49 & 7) != 0)
      fail("only matrices at a multiple of 1,024 bytes are emulated");
  }

  // Element k of row n of the operand, or of its transpose where that is what lies in rows.
  uint16_t at(int n, int k, bool is_n_major) const {
    const auto row = static_cast<uint32_t>(is_n_major ? k : n);
    const auto column = static_cast<uint32_t>(is_n_major ? n : k);
    uint32_t address = start + row / 8 * stride + row % 8 * 128 + column % 64 * 2;
    if (is_n_major)
      address += column / 64 * leading;
    else if (column >= 64)
      fail("K is 16");
    address ^= (address >> 7 & 7) << 4;
    return read_shared(address);
  }
};

struct Product {
  const uint32_t* a_registers[kLanes];  // or null, and a
  uint64_t a;
  uint64_t b;
  float* c[kLanes];
  int columns;
  bool is_n_major;
  bool accumulates;
  std::vector<uint16_t> operands;  // a [16, 16], b [N, 16], as they were at the call

  std::vector<uint16_t> read(int warp) const {
    std::vector<uint16_t> values(static_cast<size_t>((16 + columns) * kDepth));
    const auto to = [&](int row, int k) -> uint16_t& {
      return values[static_cast<size_t>(row * kDepth + k)];
    };
    for (int lane = 0; lane < kLanes && a_registers[0] != nullptr; ++lane) {
      for (int i = 0; i < 8; ++i)
        to(row_of_a(lane, i), column_of_a(lane, i)) =
            static_cast<uint16_t>(a_registers[lane][i / 2] >> (i % 2 * 16));
    }
    if (a_registers[0] == nullptr) {
      const Matrix matrix(a);
      for (int row = 0; row < 16; ++row)
        for (int k = 0; k < kDepth; ++k) to(row, k) = matrix.at(warp % 4 * 16 + row, k, false);
    }
    const Matrix matrix(b);
    for (int n = 0; n < columns; ++n)
      for (int k = 0; k < kDepth; ++k) to(16 + n, k) = matrix.at(n, k, is_n_major);
    return values;
  }
};

// Accumulators that products in flight will have changed.
struct Accumulators {
  float* registers[kLanes];
  int count;                  // a lane
  std::vector<float> values;  // [32, count]
  int num_products;
};

struct Warp {
  std::deque<std::vector<Product>> groups;
  std::vector<Product> open;
  std::vector<Accumulators> in_flight;
  bool is_settled = false;
};
std::vector<Warp> warps;

int warp_number() { return static_cast<int>(thread_idx.x) / kLanes; }

Accumulators& accumulators_of(Warp& warp, const Product& product) {
  for (Accumulators& entry : warp.in_flight)
    if (entry.registers[0] == product.c[0]) return entry;
  Accumulators entry{};
  entry.count = product.columns / 2;
  for (int lane = 0; lane < kLanes; ++lane) {
    entry.registers[lane] = product.c[lane];
    entry.values.insert(entry.values.end(), product.c[lane], product.c[lane] + entry.count);
    for (int i = 0; i < entry.count; ++i) std::memcpy(&product.c[lane][i], &kInFlight, 4);
  }
  warp.in_flight.push_back(std::move(entry));
  return warp.in_flight.back();
}

struct Call {
  float* c;
  const uint32_t* a_registers;
  uint64_t a;
  uint64_t b;
  int columns;
  bool is_n_major;
  bool accumulates;
};

void begin(void* const* lanes) {
  const Call& first = *static_cast<const Call*>(lanes[0]);
  Product product{};
  product.a = first.a;
  product.b = first.b;
  product.columns = first.columns;
  product.is_n_major = first.is_n_major;
  product.accumulates = first.accumulates;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Call& call = *static_cast<const Call*>(lanes[lane]);
    if (call.a != first.a || call.b != first.b || call.accumulates != first.accumulates)
      fail("lanes name different matrices");
    product.a_registers[lane] = call.a_registers;
    product.c[lane] = call.c;
  }
  const int number = warp_number();
  Warp& warp = warps[static_cast<size_t>(number)];
  if (!warp.is_settled) fail("registers are not settled");
  product.operands = product.read(number);
  ++accumulators_of(warp, product).num_products;
  warp.open.push_back(std::move(product));
}

float to_float(uint16_t bf16) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bf16) << 16);
}

// LLMSERVE_EMULATOR_WGMMA=wrong is a GPU that takes the operands for others than they are.
int first_term() { return std::getenv("LLMSERVE_EMULATOR_WGMMA") == nullptr ? 0 : 1; }

// The order in which a GPU adds the terms is not documented: here it is that of k, the old c first.
void finish(Warp& warp, const Product& product) {
  if (product.read(warp_number()) != product.operands) fail("an operand changed in flight");
  Accumulators& entry = accumulators_of(warp, product);
  const int first = first_term();
  std::vector<float> operands(product.operands.size());
  for (size_t i = 0; i < operands.size(); ++i) operands[i] = to_float(product.operands[i]);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < entry.count; ++i) {
      const float* a = &operands[static_cast<size_t>(row_of_c(lane, i % 4) * kDepth)];
      const int n = i / 4 * 8 + column_of_c(lane, i % 4);
      const float* b = &operands[static_cast<size_t>((16 + n) * kDepth)];
      float& c = entry.values[static_cast<size_t>(lane * entry.count + i)];
      if (!product.accumulates) c = 0.0f;
      for (int k = first; k < kDepth; ++k) c += a[k] * b[k];
    }
  }
  if (--entry.num_products > 0) return;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < entry.count; ++i) {
      float& c = entry.registers[lane][i];
      if (std::memcmp(&c, &kInFlight, 4) != 0) fail("accumulators were written to in flight");
      c = entry.values[static_cast<size_t>(lane * entry.count + i)];
    }
  }
  warp.in_flight.erase(warp.in_flight.begin() + (&entry - warp.in_flight.data()));
}

void multiply(Call call) { act_together(&call, &begin); }

Warp& my_warp() { return warps[static_cast<size_t>(warp_number())]; }

}  // namespace

void clear_products(int threads) { warps.assign(static_cast<size_t>(threads / kLanes), {}); }

void settle_registers() {
  act_together(nullptr, [](void* const*) { my_warp().is_settled = true; });
}

void commit_products() {
  act_together(nullptr, [](void* const*) {
    my_warp().groups.push_back(std::move(my_warp().open));
    my_warp().open.clear();
  });
}

void wait_for_products(int num_groups) {
  wait_for_others();  // who may write to what is still read
  act_together(&num_groups, [](void* const* lanes) {
    Warp& warp = my_warp();
    warp.is_settled = false;
    while (std::ssize(warp.groups) > *static_cast<const int*>(lanes[0])) {
      for (const Product& product : warp.groups.front()) finish(warp, product);
      warp.groups.pop_front();
    }
  });
}

void multiply_rows(float (&c)[64], uint64_t a, uint64_t b, bool accumulates) {
  multiply({c, nullptr, a, b, 128, false, accumulates});
}
void multiply_columns(float (&c)[64], const uint32_t (&a)[4], uint64_t b, bool accumulates) {
  multiply({c, a, 0, b, 128, true, accumulates});
}
void multiply_columns(float (&c)[32], const uint32_t (&a)[4], uint64_t b, bool accumulates) {
  multiply({c, a, 0, b, 64, true, accumulates});
}

namespace {

// How a barrier's 8 bytes are used is nobody's business but its own.
struct PhaseBits {
  uint16_t count;
  uint16_t missing;
  uint32_t phase;
};
static_assert(sizeof(PhaseBits) == sizeof(uint64_t));

PhaseBits load(const uint64_t* barrier) { return __builtin_bit_cast(PhaseBits, *barrier); }

}  // namespace

void init_phases(uint64_t* barrier, int count) {
  const auto all = static_cast<uint16_t>(count);
  *barrier = __builtin_bit_cast(uint64_t, PhaseBits{all, all, 0});
}

void arrive(uint64_t* barrier) {
  PhaseBits bits = load(barrier);
  if (--bits.missing == 0) {
    bits.missing = bits.count;
    ++bits.phase;
  }
  *barrier = __builtin_bit_cast(uint64_t, bits);
}

void await_phase(uint64_t* barrier, int parity) {
  const std::function<bool()> has_ended = [=] {
    return static_cast<int>(load(barrier).phase % 2) != parity;
  };
  wait_until(has_ended);
}

}  // namespace llmserve::cuda::emulator
