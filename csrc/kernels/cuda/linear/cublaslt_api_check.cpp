// Built only where the real header is found: every number of cublaslt_api.h against it.
#include <cublasLt.h>

#include <cstddef>
#include <type_traits>

#include "kernels/cuda/linear/cublaslt_api.h"

namespace llmserve::cuda::cublaslt {

static_assert(sizeof(Algo) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(HeuristicResult) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(HeuristicResult, workspace_bytes) ==
              offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(HeuristicResult, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));
static_assert(sizeof(cublasStatus_t) == sizeof(Status) && CUBLAS_STATUS_SUCCESS == 0);
static_assert(sizeof(cublasComputeType_t) == sizeof(int) && kCompute32F == CUBLAS_COMPUTE_32F);
static_assert(sizeof(cublasOperation_t) == sizeof(int32_t) && kOpT == CUBLAS_OP_T);
static_assert(kDescTransA == CUBLASLT_MATMUL_DESC_TRANSA);
static_assert(kDescEpilogue == CUBLASLT_MATMUL_DESC_EPILOGUE);
static_assert(kDescBiasPointer == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
static_assert(kDescScalePointerA == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
static_assert(kDescScalePointerB == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
static_assert(kDescScaleModeA == CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
static_assert(kDescScaleModeB == CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
static_assert(sizeof(cublasLtMatmulMatrixScale_t) == sizeof(int32_t) &&
              kScaleColumns == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F &&
              kScaleColumns128 == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
static_assert(sizeof(cublasLtEpilogue_t) == sizeof(kEpilogueBias) &&
              kEpilogueBias == CUBLASLT_EPILOGUE_BIAS);
static_assert(kPrefMaxWorkspaceBytes == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
static_assert(kPrefMinAlignmentA == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
static_assert(kPrefMinAlignmentB == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
static_assert(kPrefMinAlignmentC == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
static_assert(kPrefMinAlignmentD == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);

// Same number and kinds of arguments: what differs is the names of pointers and enumerations.
template <class Ours, class Theirs>
inline constexpr bool kIsCalledAlike = false;
template <class... Ours, class... Theirs>
inline constexpr bool kIsCalledAlike<Status (*)(Ours...), cublasStatus_t (*)(Theirs...)> =
    sizeof...(Ours) == sizeof...(Theirs) &&
    ((sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>) &&
     ...);
static_assert(kIsCalledAlike<decltype(Functions::Create), decltype(&cublasLtCreate)>);
static_assert(
    kIsCalledAlike<decltype(Functions::MatmulDescCreate), decltype(&cublasLtMatmulDescCreate)>);
static_assert(kIsCalledAlike<decltype(Functions::MatmulDescSetAttribute),
                             decltype(&cublasLtMatmulDescSetAttribute)>);
static_assert(
    kIsCalledAlike<decltype(Functions::MatrixLayoutCreate), decltype(&cublasLtMatrixLayoutCreate)>);
static_assert(kIsCalledAlike<decltype(Functions::MatmulPreferenceSetAttribute),
                             decltype(&cublasLtMatmulPreferenceSetAttribute)>);
static_assert(kIsCalledAlike<decltype(Functions::MatmulAlgoGetHeuristic),
                             decltype(&cublasLtMatmulAlgoGetHeuristic)>);
static_assert(
    kIsCalledAlike<decltype(Functions::MatmulAlgoCheck), decltype(&cublasLtMatmulAlgoCheck)>);
static_assert(kIsCalledAlike<decltype(Functions::Matmul), decltype(&cublasLtMatmul)>);

}  // namespace llmserve::cuda::cublaslt
