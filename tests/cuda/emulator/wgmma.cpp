// Products of warpgroups by the PTX ISA, "Asynchronous warpgroup level matrix instructions". A
// mistake that a GPU would answer with wrong numbers or a hang ends the process here and says what
// it was:
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

  // Where element k of row n of the operand lies, or of its transpose where that is what lies in
  // rows.
  uint32_t place(int n, int k, bool is_n_major) const {
    const auto row = static_cast<uint32_t>(is_n_major ? k : n);
    const auto column = static_cast<uint32_t>(is_n_major ? n : k);
    uint32_t address = start + row / 8 * stride + row % 8 * 128 + column % 64 * 2;
    if (is_n_major)
      address += column / 64 * leading;
    else if (column >= 64)
      fail("K is 16");
    return address ^ (address >> 7 & 7) << 4;
  }

  // The rows' elements, [rows, 16]. Eight neighbours in memory are read at once: a test may have
  // millions of them.
  void read(int first, int rows, bool is_n_major, uint16_t* to) const {
    constexpr int kNeighbours = 8;
    for (int n = first; n < first + rows; n += is_n_major ? kNeighbours : 1) {
      for (int k = 0; k < kDepth; k += is_n_major ? 1 : kNeighbours) {
        uint16_t values[kNeighbours];
        read_shared(place(n, k, is_n_major), values);
        for (int i = 0; i < kNeighbours; ++i)
          to[is_n_major ? (n - first + i) * kDepth + k : (n - first) * kDepth + k + i] = values[i];
      }
    }
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
    if (a_registers[0] == nullptr) Matrix(a).read(warp % 4 * 16, 16, false, values.data());
    Matrix(b).read(0, columns, is_n_major, values.data() + 16 * kDepth);
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

// LLMSERVE_EMULATOR_WGMMA=wrong is a GPU that takes the operands for others than they are; uneven
// one that adds the terms in another order where N is 8.
bool is_gpu(const char* kind) {
  const char* text = std::getenv("LLMSERVE_EMULATOR_WGMMA");
  return text != nullptr && std::strcmp(text, kind) == 0;
}

// The order in which a GPU adds the terms is not documented: here it is that of k, the old c first.
template <int kColumns>
void add_terms(const Product& product, Accumulators& entry, int first, int turned) {
  float b[kDepth][kColumns];
  float c[16][kColumns];
  const uint16_t* a = product.operands.data();
  for (int n = 0; n < kColumns; ++n)
    for (int k = 0; k < kDepth; ++k) b[k][n] = to_float(a[(16 + n) * kDepth + k]);
  const auto each = [&](const auto& act) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < kColumns / 2; ++i)
        act(entry.values[static_cast<size_t>(lane * kColumns / 2 + i)],
            c[row_of_c(lane, i % 4)][i / 4 * 8 + column_of_c(lane, i % 4)]);
  };
  each([&](float old, float& to) { to = product.accumulates ? old : 0.0f; });
  for (int row = 0; row < 16; ++row) {
    for (int k = first; k < kDepth; ++k) {
      const float x = to_float(a[row * kDepth + (k ^ turned)]);
      for (int n = 0; n < kColumns; ++n) c[row][n] += x * b[k ^ turned][n];
    }
  }
  each([](float& to, float sum) { to = sum; });
}

void finish(Warp& warp, const Product& product) {
  if (product.read(warp_number()) != product.operands) fail("an operand changed in flight");
  Accumulators& entry = accumulators_of(warp, product);
  const int first = is_gpu("wrong") ? 1 : 0;
  const int turned = product.columns == 8 && is_gpu("uneven") ? kDepth - 1 : 0;
  switch (product.columns) {
    case 8:
      add_terms<8>(product, entry, first, turned);
      break;
    case 16:
      add_terms<16>(product, entry, first, turned);
      break;
    case 32:
      add_terms<32>(product, entry, first, turned);
      break;
    case 64:
      add_terms<64>(product, entry, first, turned);
      break;
    default:
      add_terms<128>(product, entry, first, turned);
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
void multiply_rows(float (&c)[32], uint64_t a, uint64_t b, bool accumulates) {
  multiply({c, nullptr, a, b, 64, false, accumulates});
}
void multiply_rows(float (&c)[16], uint64_t a, uint64_t b, bool accumulates) {
  multiply({c, nullptr, a, b, 32, false, accumulates});
}
void multiply_rows(float (&c)[8], uint64_t a, uint64_t b, bool accumulates) {
  multiply({c, nullptr, a, b, 16, false, accumulates});
}
void multiply_rows(float (&c)[4], uint64_t a, uint64_t b, bool accumulates) {
  multiply({c, nullptr, a, b, 8, false, accumulates});
}
void multiply_columns(float (&c)[64], const uint32_t (&a)[4], uint64_t b, bool accumulates) {
  multiply({c, a, 0, b, 128, true, accumulates});
}
void multiply_columns(float (&c)[32], const uint32_t (&a)[4], uint64_t b, bool accumulates) {
  multiply({c, a, 0, b, 64, true, accumulates});
}

}  // namespace llmserve::cuda::emulator
