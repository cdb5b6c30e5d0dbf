// Matrix products by cuBLASLt, found at run time.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>

#include "core/buffer.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/linear/cublaslt_api.h"

namespace llmserve::cuda {

// Which scales of operands in E4M3 the library applies.
enum class Fp8Scales : uint8_t { kNone, kRows, kBlocks };

// A product of E4M3 with E4M3: out [M, N] = x W^T (+ out), each operand's elements times the scale
// that is theirs.
struct Fp8Product {
  const std::byte* x;          // [M, K]
  const float* x_scales;       // a row [M], or 128 of a row [K / 128, M]
  const std::byte* weight;     // [N, K]
  const float* weight_scales;  // [N], or [K / 128, N]
  Rows out;
  int64_t num_rows;      // M
  int64_t out_features;  // N
  int64_t in_features;   // K, a multiple of 128
  bool accumulate;
};

class CublasLt {
 public:
  // What NVIDIA's documentation recommends for Hopper; enough for any of its algorithms. Taken for
  // good.
  static constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

  // Null, and the reason in `problem`, where there is no cuBLASLt. Looked for in this order: one
  // that the process has loaded already (PyTorch's), the nvidia-cublas wheel in the folder that
  // this package is installed in, the loader's own places (LD_LIBRARY_PATH).
  static std::unique_ptr<CublasLt> open(DeviceMemory& memory, std::string& problem);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // "cuBLASLt 13.0.2".
  std::string description() const;

  // out = x W^T (+ bias) (+ out, if accumulate), in float32 without TF32, or of bf16 operands with
  // float32 sums. x holds what the weight holds: float32, or bf16 bits. False, and nothing done,
  // where cuBLASLt has no algorithm for the shape.
  //
  // The algorithm is the fastest of those that cuBLASLt proposes, measured at the first product of
  // each (N, K, bucket of M) and kept for the bucket; the first one while a graph is captured or
  // where there is no memory to measure in. So it may be another one in another run.
  bool multiply(const void* x, int64_t x_stride, const LinearParams& params);
  // Likewise, of E4M3 with float32 sums. Where the library or the device has no such scales,
  // nothing is done either.
  bool multiply(const Fp8Product& product, Fp8Scales scales);
  // Whether a small product with such scales has the right result here. Runs and waits for it the
  // first time, which must not be within a capture.
  bool can_scale(Fp8Scales scales);

 private:
  CublasLt(DeviceMemory& memory, const cublaslt::Functions& functions);

  // What a call hands over besides its shape.
  struct Operands {
    const void* x;
    const void* weight;
    const float* bias;  // or null
    float* out;
    bool accumulate;
    const float* x_scales = nullptr;
    const float* weight_scales = nullptr;
  };
  struct Product;  // descriptors and algorithm of one shape
  // [M, N, K, row stride of x, of out, least alignment of x, of the weight, of out and bias,
  // storage, whether there is a bias, scales]
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t, uint32_t, uint32_t,
                         Storage, bool, Fp8Scales>;
  // The same of a bucket: [N, K, bucket of M, the three alignments, storage, bias, scales]; an
  // algorithm relies on alignments.
  using BucketKey =
      std::tuple<int64_t, int64_t, int64_t, uint32_t, uint32_t, uint32_t, Storage, bool, Fp8Scales>;
  bool multiply(const Key& key, const Operands& operands);
  bool scales_rightly(Fp8Scales scales);
  Product& product(const Key& key, const Operands& operands);
  void describe(Product& product, const Key& key);
  void choose(Product& product, const Key& key, const Operands& operands);
  // The index of the fastest; the first where there is no memory to measure in.
  size_t measure(const Product& product, const Key& key, const Operands& operands,
                 std::span<const cublaslt::HeuristicResult> candidates);
  cublaslt::Status run(const Product& product, const Operands& operands,
                       const cublaslt::Algo& algorithm, void* to);

  DeviceMemory& memory_;
  const cublaslt::Functions f_;
  cublaslt::Handle handle_ = nullptr;
  Buffer workspace_;
  std::map<Key, std::unique_ptr<Product>> products_;
  std::map<BucketKey, cublaslt::Algo> measured_;
  std::array<std::optional<bool>, 3> can_scale_;  // by Fp8Scales; none: not tried yet
};

}  // namespace llmserve::cuda
