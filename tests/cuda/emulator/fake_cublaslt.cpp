// A cuBLASLt for machines without one: the calls that csrc/kernels/cuda/linear/cublaslt_api.h
// declares, on host memory, by the words of NVIDIA's documentation. Matrices are stored by columns.
// It proposes three algorithms, the last of which it refuses to run.
#include <dlfcn.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "kernels/cuda/linear/cublaslt_api.h"

using namespace llmserve::cuda::cublaslt;

namespace {

constexpr Status kInvalid = 7;        // CUBLAS_STATUS_INVALID_VALUE
constexpr Status kNotSupported = 15;  // CUBLAS_STATUS_NOT_SUPPORTED

struct Desc {
  int32_t trans_a = 0;
  uint32_t epilogue = 1;
  const float* bias = nullptr;
  const float* scales[2] = {};  // of A and B
  int32_t scale_modes[2] = {};
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

// E4M3, bit by bit.
float from_fp8(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  if ((code & 127) == 127) return std::numeric_limits<float>::quiet_NaN();
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                    : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code & 128 ? -value : value;
}

float element(const Layout& layout, const void* data, uint64_t row, uint64_t column) {
  const uint64_t i = column * static_cast<uint64_t>(layout.leading) + row;
  if (layout.type == CUDA_R_32F) return static_cast<const float*>(data)[i];
  if (layout.type == CUDA_R_8F_E4M3) return from_fp8(static_cast<const uint8_t*>(data)[i]);
  const uint32_t bits = static_cast<const uint16_t*>(data)[i];
  return __builtin_bit_cast(float, bits << 16);
}

// What a column of an operand is scaled with from element k on, by the mode of scales.
float scale_of(const Desc& desc, int operand, const Layout& layout, uint64_t k, uint64_t column) {
  const float* scales = desc.scales[operand];
  if (scales == nullptr) return 1.0f;
  switch (desc.scale_modes[operand]) {
    case kScaleColumns:
      return scales[column];
    case kScaleColumns128:
      return scales[k / 128 * layout.columns + column];
    default:
      return *scales;
  }
}

// LLMSERVE_FAKE_CUBLASLT=old: before 12.8, without modes of scales.
bool has_scale_modes() {
  const char* age = std::getenv("LLMSERVE_FAKE_CUBLASLT");
  return age == nullptr || std::strcmp(age, "old") != 0;
}

// What the manual asks of operands of 8 bits: K and rows of 16 bytes, no bias of f32, one mode for
// both, columns of D in 16 bytes.
bool fits_fp8(const Desc& desc, const Layout& a, const Layout& b, const Layout& d) {
  if (a.type != CUDA_R_8F_E4M3) return desc.scales[0] == nullptr && desc.scales[1] == nullptr;
  return a.rows % 16 == 0 && a.leading % 16 == 0 && b.leading % 16 == 0 && d.leading % 4 == 0 &&
         d.rows % 4 == 0 && desc.epilogue == 1 && desc.scale_modes[0] == desc.scale_modes[1];
}

// op(A) [N, K] times B [K, M] is D [N, M].
bool fits(const Desc& desc, const Layout& a, const Layout& b, const Layout& d) {
  return fits_fp8(desc, a, b, d) && desc.trans_a == kOpT && a.rows == b.rows &&
         a.columns == d.rows && b.columns == d.columns &&
         a.leading >= static_cast<int64_t>(a.rows) && b.leading >= static_cast<int64_t>(b.rows) &&
         d.leading >= static_cast<int64_t>(d.rows) && a.type == b.type && d.type == CUDA_R_32F;
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
  void* to = attribute == kDescTransA          ? static_cast<void*>(&d.trans_a)
             : attribute == kDescEpilogue      ? static_cast<void*>(&d.epilogue)
             : attribute == kDescBiasPointer   ? static_cast<void*>(&d.bias)
             : attribute == kDescScalePointerA ? static_cast<void*>(&d.scales[0])
             : attribute == kDescScalePointerB ? static_cast<void*>(&d.scales[1])
             : !has_scale_modes()              ? nullptr
             : attribute == kDescScaleModeA    ? static_cast<void*>(&d.scale_modes[0])
             : attribute == kDescScaleModeB    ? static_cast<void*>(&d.scale_modes[1])
                                               : nullptr;
  const bool is_pointer = attribute == kDescBiasPointer || attribute == kDescScalePointerA ||
                          attribute == kDescScalePointerB;
  if (to == nullptr || size != (is_pointer ? 8 : 4)) return kInvalid;
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
      for (uint64_t k = 0; k < la.rows; ++k) {
        const float scale = scale_of(desc, 0, la, k, row) * scale_of(desc, 1, lb, k, column);
        sum += element(la, a, k, row) * element(lb, b, k, column) * scale;
      }
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
