// Matrix products by cuBLASLt, found at run time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "core/buffer.h"
#include "kernels/cuda/cublaslt_api.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/kernels.h"

namespace llmserve::cuda {

class CublasLt {
 public:
  // Null, and the reason in `problem`, where there is no cuBLASLt. Looked for in this order: one
  // that the process has loaded already (PyTorch's), the nvidia-cublas wheel in the folder that
  // this package is installed in, the loader's own places (LD_LIBRARY_PATH).
  static std::unique_ptr<CublasLt> open(DeviceMemory& memory, std::string& problem);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // "cuBLASLt 13.0.2".
  std::string description() const;

  // out += x W^T, in float32 without TF32, or of bf16 operands with float32 sums. x holds what the
  // weight holds: float32, or bf16 bits. False, and nothing done, where cuBLASLt has no algorithm
  // for the shape. The algorithm is its first choice for the shape, asked for once.
  bool add_product(const void* x, int64_t x_stride, const LinearParams& params);

 private:
  CublasLt(DeviceMemory& memory, const cublaslt::Functions& functions);

  struct Product;  // descriptors and algorithm of one shape
  // [M, N, K, row stride of x, of out, least alignment of x, of the weight, of out, storage]
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t, uint32_t, uint32_t,
                         Storage>;
  const Product& product(const Key& key);

  DeviceMemory& memory_;
  const cublaslt::Functions f_;
  cublaslt::Handle handle_ = nullptr;
  Buffer workspace_;
  std::map<Key, std::unique_ptr<Product>> products_;
};

}  // namespace llmserve::cuda
