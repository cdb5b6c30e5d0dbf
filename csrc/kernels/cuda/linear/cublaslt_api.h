// The part of cuBLASLt's C interface that is used here, declared by ourselves: the build needs no
// cuBLAS, and the library is found at run time (cublaslt.h). The numbers are those of the public
// interface since CUDA 11; where the build finds the real header, cublaslt_api_check.cpp compares
// every one of them.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

namespace llmserve::cuda::cublaslt {

using Status = int;  // 0: success
using Handle = void*;
using MatmulDesc = void*;
using MatrixLayout = void*;
using Preference = void*;

struct Algo {
  uint64_t data[8];
};
struct HeuristicResult {
  Algo algo;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

inline constexpr int kCompute32F = 68;  // full float32: no TF32
inline constexpr int kOpT = 1;
// Attributes of a MatmulDesc.
inline constexpr int kDescTransA = 3;          // int32
inline constexpr int kDescEpilogue = 7;        // uint32
inline constexpr int kDescBiasPointer = 8;     // const void*, of D's type, one a row of D
inline constexpr int kDescScalePointerA = 17;  // const void*, and so is the next
inline constexpr int kDescScalePointerB = 18;
inline constexpr int kDescScaleModeA = 31;  // int32, and so is the next; since CUDA 12.8
inline constexpr int kDescScaleModeB = 32;
inline constexpr uint32_t kEpilogueBias = 4;
// Modes of scales, since CUDA 12.9: an f32 for each column of an operand as it is stored, or for
// each column and 128 elements of it, those of neighbouring columns side by side.
inline constexpr int32_t kScaleColumns = 3;
inline constexpr int32_t kScaleColumns128 = 4;
// Attributes of a Preference.
inline constexpr int kPrefMaxWorkspaceBytes = 1;  // uint64
inline constexpr int kPrefMinAlignmentA = 5;      // uint32, and so are the next three
inline constexpr int kPrefMinAlignmentB = 6;
inline constexpr int kPrefMinAlignmentC = 7;
inline constexpr int kPrefMinAlignmentD = 8;

// The functions, by their names without "cublasLt".
struct Functions {
  Status (*Create)(Handle*);
  Status (*Destroy)(Handle);
  size_t (*GetVersion)();
  Status (*MatmulDescCreate)(MatmulDesc*, int compute, cudaDataType scale);
  Status (*MatmulDescDestroy)(MatmulDesc);
  Status (*MatmulDescSetAttribute)(MatmulDesc, int attribute, const void*, size_t);
  Status (*MatrixLayoutCreate)(MatrixLayout*, cudaDataType, uint64_t rows, uint64_t columns,
                               int64_t leading);
  Status (*MatrixLayoutDestroy)(MatrixLayout);
  Status (*MatmulPreferenceCreate)(Preference*);
  Status (*MatmulPreferenceDestroy)(Preference);
  Status (*MatmulPreferenceSetAttribute)(Preference, int attribute, const void*, size_t);
  Status (*MatmulAlgoGetHeuristic)(Handle, MatmulDesc, MatrixLayout a, MatrixLayout b,
                                   MatrixLayout c, MatrixLayout d, Preference, int requested,
                                   HeuristicResult[], int* returned);
  // Whether an algorithm can run this product; its needs in the result.
  Status (*MatmulAlgoCheck)(Handle, MatmulDesc, MatrixLayout a, MatrixLayout b, MatrixLayout c,
                            MatrixLayout d, const Algo*, HeuristicResult*);
  Status (*Matmul)(Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout,
                   const void* b, MatrixLayout, const void* beta, const void* c, MatrixLayout,
                   void* d, MatrixLayout, const Algo*, void* workspace, size_t, cudaStream_t);
};

}  // namespace llmserve::cuda::cublaslt
