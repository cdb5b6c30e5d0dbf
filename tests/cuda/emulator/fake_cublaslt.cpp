// A cuBLASLt for machines without one: the calls that csrc/kernels/cuda/linear/cublaslt_api.h
// declares, on host memory, by the words of NVIDIA's documentation. Matrices are stored by columns.
// It proposes three algorithms, the last of which it refuses to run.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "kernels/cuda/linear/cublaslt_api.h"

using namespace llmserve::cuda::cublaslt;

namespace {

constexpr Status kInvalid = 7;        // CUBLAS_STATUS_INVALID_VALUE
constexpr Status kNotSupported = 15;  // CUBLAS_STATUS_NOT_SUPPORTED

struct Desc {
  int32_t trans_a = 0;
  uint32_t epilogue = 1;
  const float* bias = nullptr;
};
struct Layout {
  cudaDataType type;
  uint64_t rows;
  uint64_t columns;
  int64_t leading;
};
struct Limits {
  uint32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D
};

float element(const Layout& layout, const void* data, uint64_t row, uint64_t column) {
  const uint64_t i = column * static_cast<uint64_t>(layout.leading) + row;
  if (layout.type == CUDA_R_32F) return static_cast<const float*>(data)[i];
  const uint32_t bits = static_cast<const uint16_t*>(data)[i];
  return __builtin_bit_cast(float, bits << 16);
}

// op(A) [N, K] times B [K, M] is D [N, M].
bool fits(const Desc& desc, const Layout& a, const Layout& b, const Layout& d) {
  return desc.trans_a == kOpT && a.rows == b.rows && a.columns == d.rows &&
         b.columns == d.columns && a.leading >= static_cast<int64_t>(a.rows) &&
         b.leading >= static_cast<int64_t>(b.rows) && d.leading >= static_cast<int64_t>(d.rows) &&
         a.type == b.type && d.type == CUDA_R_32F;
}

// The emulated device keeps its work until somebody waits for it; so this product does, too.
void wait_for(cudaStream_t stream) {
  void* library = dlopen("libllmserve_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  void* wait = library != nullptr ? dlsym(library, "llmserve_emulator_wait") : nullptr;
  if (wait == nullptr) std::abort();
  reinterpret_cast<void (*)(cudaStream_t)>(wait)(stream);
}

template <class T>
T& as(void* handle) {
  return *static_cast<T*>(handle);
}

}  // namespace

extern "C" {

Status cublasLtCreate(Handle* handle) {
  *handle = std::malloc(1);
  return 0;
}
Status cublasLtDestroy(Handle handle) {
  std::free(handle);
  return 0;
}
size_t cublasLtGetVersion() { return 130000; }

Status cublasLtMatmulDescCreate(MatmulDesc* desc, int compute, cudaDataType scale) {
  if (compute != kCompute32F || scale != CUDA_R_32F) return kInvalid;
  *desc = new Desc;
  return 0;
}
Status cublasLtMatmulDescDestroy(MatmulDesc desc) {
  delete static_cast<Desc*>(desc);
  return 0;
}
Status cublasLtMatmulDescSetAttribute(MatmulDesc desc, int attribute, const void* value,
                                      size_t size) {
  auto& d = as<Desc>(desc);
  void* to = attribute == kDescTransA        ? static_cast<void*>(&d.trans_a)
             : attribute == kDescEpilogue    ? static_cast<void*>(&d.epilogue)
             : attribute == kDescBiasPointer ? static_cast<void*>(&d.bias)
                                             : nullptr;
  if (to == nullptr || size != (attribute == kDescBiasPointer ? 8 : 4)) return kInvalid;
  std::memcpy(to, value, size);
  return 0;
}
Status cublasLtMatrixLayoutCreate(MatrixLayout* layout, cudaDataType type, uint64_t rows,
                                  uint64_t columns, int64_t leading) {
  *layout = new Layout{type, rows, columns, leading};
  return 0;
}
Status cublasLtMatrixLayoutDestroy(MatrixLayout layout) {
  delete static_cast<Layout*>(layout);
  return 0;
}
Status cublasLtMatmulPreferenceCreate(Preference* preference) {
  *preference = new Limits;
  return 0;
}
Status cublasLtMatmulPreferenceDestroy(Preference preference) {
  delete static_cast<Limits*>(preference);
  return 0;
}
Status cublasLtMatmulPreferenceSetAttribute(Preference preference, int attribute, const void* value,
                                            size_t size) {
  if (attribute == kPrefMaxWorkspaceBytes) return size == 8 ? 0 : kInvalid;
  if (attribute < kPrefMinAlignmentA || attribute > kPrefMinAlignmentD || size != 4)
    return kInvalid;
  std::memcpy(&as<Limits>(preference).alignment[attribute - kPrefMinAlignmentA], value, size);
  return 0;
}

Status cublasLtMatmulAlgoCheck(Handle, MatmulDesc desc, MatrixLayout a, MatrixLayout b,
                               MatrixLayout, MatrixLayout d, const Algo* algo,
                               HeuristicResult* result) {
  *result = {*algo, 0, 0, 1.0f, {}};
  return fits(as<Desc>(desc), as<Layout>(a), as<Layout>(b), as<Layout>(d)) ? 0 : kInvalid;
}

// The alignment that was asked for goes into the algorithm, which insists on it.
Status cublasLtMatmulAlgoGetHeuristic(Handle, MatmulDesc desc, MatrixLayout a, MatrixLayout b,
                                      MatrixLayout, MatrixLayout d, Preference preference,
                                      int requested, HeuristicResult results[], int* returned) {
  *returned = 0;
  if (!fits(as<Desc>(desc), as<Layout>(a), as<Layout>(b), as<Layout>(d))) return kNotSupported;
  const auto& limits = as<Limits>(preference);
  for (uint64_t i = 0; i < 3 && *returned < requested; ++i) {
    results[i] = {
        {{i, limits.alignment[0], limits.alignment[1], limits.alignment[3]}}, 0, 0, 1, {}};
    ++*returned;
  }
  return 0;
}

Status cublasLtMatmul(Handle, MatmulDesc desc_handle, const void* alpha, const void* a,
                      MatrixLayout a_layout, const void* b, MatrixLayout b_layout, const void* beta,
                      const void* c, MatrixLayout c_layout, void* d, MatrixLayout d_layout,
                      const Algo* algo, void* workspace, size_t, cudaStream_t stream) {
  wait_for(stream);
  const auto& desc = as<Desc>(desc_handle);
  const auto& la = as<Layout>(a_layout);
  const auto& lb = as<Layout>(b_layout);
  const auto& ld = as<Layout>(d_layout);
  if (!fits(desc, la, lb, ld) || workspace == nullptr) return kInvalid;
  if (algo->data[0] == 2) return kNotSupported;
  const void* pointers[] = {a, b, d};
  for (int i = 0; i < 3; ++i)
    if (reinterpret_cast<uintptr_t>(pointers[i]) % algo->data[i + 1] != 0) std::abort();
  const bool has_bias = desc.epilogue == kEpilogueBias;
  if (has_bias &&
      (desc.bias == nullptr || reinterpret_cast<uintptr_t>(desc.bias) % algo->data[3] != 0))
    std::abort();
  for (uint64_t column = 0; column < ld.columns; ++column) {
    for (uint64_t row = 0; row < ld.rows; ++row) {
      float sum = 0;
      for (uint64_t k = 0; k < la.rows; ++k)
        sum += element(la, a, k, row) * element(lb, b, k, column);
      sum *= *static_cast<const float*>(alpha);
      if (const float scale = *static_cast<const float*>(beta); scale != 0)
        sum += scale * element(as<Layout>(c_layout), c, row, column);
      if (has_bias) sum += desc.bias[row];
      static_cast<float*>(d)[column * static_cast<uint64_t>(ld.leading) + row] = sum;
    }
  }
  return 0;
}

}  // extern "C"
