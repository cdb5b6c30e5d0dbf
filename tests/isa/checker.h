// What isa_check is made of: guarded arrays, seeded values, and comparison with the ref backend.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/float_types.h"
#include "core/mix.h"
#include "kernels/backend.h"
#include "kernels/ref/bf16_products.h"

namespace llmserve::isa_check {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// tests/parity: n terms with roundings of random signs, and a factor of 8 for the tail.
inline float sum_tolerance(int64_t n) { return 8 * std::sqrt(static_cast<float>(n)) * 0x1p-24f; }

// Ends where unreadable memory begins: a kernel that touches what lies behind it dies.
template <class T>
class Array {
 public:
  explicit Array(int64_t size, T fill = T{}) : size_(size) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t bytes = (size * int64_t{sizeof(T)} + page - 1) / page * page;
    mapped_ = bytes + page;
    base_ = static_cast<char*>(mmap(nullptr, static_cast<size_t>(mapped_), PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + bytes, static_cast<size_t>(page), PROT_NONE) != 0)
      throw ResourceExhausted("mmap");
    data_ = reinterpret_cast<T*>(base_ + bytes) - size;
    std::fill(begin(), end(), fill);
  }
  Array(Array&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        mapped_(other.mapped_),
        data_(other.data_),
        size_(other.size_) {}
  Array(const Array& other) : Array(other.size_) { std::copy(other.begin(), other.end(), begin()); }
  Array& operator=(const Array&) = delete;
  ~Array() {
    if (base_ != nullptr) munmap(base_, static_cast<size_t>(mapped_));
  }
  int64_t size() const { return size_; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  char* base_ = nullptr;
  int64_t mapped_ = 0;
  T* data_ = nullptr;
  int64_t size_ = 0;
};
using Floats = Array<float>;

// Values of about the normal distribution's first moments, in [-3.5, 3.5].
inline Floats normal(int64_t size, uint64_t seed) {
  Floats x(size);
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t bits = mix64(seed, static_cast<uint64_t>(i));
    const int sum = static_cast<int>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                     (bits >> 32 & 0xffff) + (bits >> 48));
    x[i] = static_cast<float>(sum - 2 * 0xffff) * 0x1.bbp-16f;
  }
  return x;
}

inline Array<uint16_t> to_16_bits(const Floats& x, DType dtype) {
  Array<uint16_t> y(x.size());
  for (int64_t i = 0; i < x.size(); ++i)
    y[i] = dtype == DType::kBF16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i]);
  return y;
}

// [rows, width], the rows `stride` apart.
inline Tensor matrix(const Floats& x, int64_t rows, int64_t width, int64_t stride) {
  Tensor view(x.begin(), DType::kF32, {rows, width});
  view.strides[0] = stride;
  return view;
}
inline Tensor vector(const Floats& x) { return Tensor(x.begin(), DType::kF32, {x.size()}); }

struct Isa {
  std::string name;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Backend> ref;  // which specifies its products of bf16
  bool has_bf16_products() const { return bf16_products(name) != Bf16Products::kNone; }
};

// The ops under test, the specification, and the count of what agreed.
struct Checker {
  std::unique_ptr<Backend> ref = make_backend("ref", {});
  std::vector<Isa> isas;
  bool is_exact = false;  // products of bf16 have the bits of the manual, not only its accuracy
  int passed = 0;
  int failed = 0;

  void report(bool is_good, const std::string& what) {
    ++(is_good ? passed : failed);
    if (!is_good) std::printf("FAILED %s\n", what.c_str());
  }

  // |got - want| <= tolerance(i), a NaN where a NaN is due; without tolerance, equal bits.
  template <class T, class Tolerance>
  void close(const std::string& what, const Array<T>& got, const Array<T>& want,
             Tolerance tolerance) {
    for (int64_t i = 0; i < want.size(); ++i) {
      if (std::memcmp(&got[i], &want[i], sizeof(T)) == 0 ||
          (got[i] != got[i] && want[i] != want[i]))
        continue;
      if (!(std::fabs(static_cast<float>(got[i]) - static_cast<float>(want[i])) <= tolerance(i)))
        return report(false,
                      concat(what, ": [", i, "] is ", got[i], ", off by ", got[i] - want[i]));
    }
    report(true, what);
  }
  template <class T>
  void equal(const std::string& what, const Array<T>& got, const Array<T>& want) {
    close(what, got, want, [](int64_t) { return -1.0f; });
  }

  // compute(backend) within tolerance(i, want) of the specification.
  template <class Compute, class Tolerance>
  void against_ref(const std::string& what, Compute compute, Tolerance tolerance) {
    const Floats want = compute(*ref);
    for (const Isa& isa : isas)
      close(concat(isa.name, " ", what), compute(*isa.backend), want,
            [&](int64_t i) { return tolerance(i, want[i]); });
  }
  template <class Compute>
  void same_as_ref(const std::string& what, Compute compute) {
    const auto want = compute(*ref);
    for (const Isa& isa : isas) equal(concat(isa.name, " ", what), compute(*isa.backend), want);
  }
};

}  // namespace llmserve::isa_check
