// Compiled, never run, where the CUDA toolkit brings cublasLt.h: our own declarations agree with it.
#include <cublasLt.h>

#include <type_traits>

#include "tigon/base/cuda/cublaslt_api.h"

namespace tigon::cuda::lt {
namespace {

static_assert(int(CUBLAS_STATUS_SUCCESS) == 0);
static_assert(sizeof(Status) == sizeof(cublasStatus_t));
static_assert(sizeof(Handle) == sizeof(cublasLtHandle_t) &&
              sizeof(MatmulDesc) == sizeof(cublasLtMatmulDesc_t));
static_assert(sizeof(Layout) == sizeof(cublasLtMatrixLayout_t) &&
              sizeof(Preference) == sizeof(cublasLtMatmulPreference_t));

static_assert(sizeof(Algo) == sizeof(cublasLtMatmulAlgo_t) && alignof(Algo) == alignof(cublasLtMatmulAlgo_t));
static_assert(sizeof(HeuristicResult) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(HeuristicResult, algo) == offsetof(cublasLtMatmulHeuristicResult_t, algo));
static_assert(offsetof(HeuristicResult, workspace_size) ==
              offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(HeuristicResult, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));
static_assert(offsetof(HeuristicResult, waves) == offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));

static_assert(int(kR32F) == int(CUDA_R_32F) && int(kR16F) == int(CUDA_R_16F) &&
              int(kR16BF) == int(CUDA_R_16BF));
static_assert(int(kCompute32F) == int(CUBLAS_COMPUTE_32F));
static_assert(int(kOpN) == int(CUBLAS_OP_N) && int(kOpT) == int(CUBLAS_OP_T));
static_assert(int(kDescTransA) == int(CUBLASLT_MATMUL_DESC_TRANSA) &&
              int(kDescTransB) == int(CUBLASLT_MATMUL_DESC_TRANSB));
static_assert(int(kR8FE4M3) == int(CUDA_R_8F_E4M3));
static_assert(int(kDescScalesA) == int(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER) &&
              int(kDescScalesB) == int(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER) &&
              int(kDescFastSums) == int(CUBLASLT_MATMUL_DESC_FAST_ACCUM));
#if CUBLAS_VERSION >= 120900
static_assert(int(kDescScaleModeA) == int(CUBLASLT_MATMUL_DESC_A_SCALE_MODE) &&
              int(kDescScaleModeB) == int(CUBLASLT_MATMUL_DESC_B_SCALE_MODE) &&
              int(kScaleOuterVector) == int(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F));
#endif
static_assert(int(kAlgoId) == int(CUBLASLT_ALGO_CONFIG_ID) &&
              int(kAlgoTile) == int(CUBLASLT_ALGO_CONFIG_TILE_ID) &&
              int(kAlgoSplitK) == int(CUBLASLT_ALGO_CONFIG_SPLITK_NUM) &&
              int(kAlgoReduction) == int(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) &&
              int(kAlgoStages) == int(CUBLASLT_ALGO_CONFIG_STAGES_ID) &&
              int(kAlgoCluster) == int(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID));
static_assert(int(kTile128x160) == int(CUBLASLT_MATMUL_TILE_128x160) &&
              int(kTile168x128) == int(CUBLASLT_MATMUL_TILE_168x128) &&
              int(kTile176x128) == int(CUBLASLT_MATMUL_TILE_176x128));
static_assert(int(kPrefMaxWorkspace) == int(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES));
static_assert(int(kPrefReductions) == int(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) &&
              int(kReduceNone) == int(CUBLASLT_REDUCTION_SCHEME_NONE) &&
              int(kReduceInComputeType) == int(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
static_assert(int(kPrefAlignA) == int(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES));
static_assert(int(kPrefAlignB) == int(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES));
static_assert(int(kPrefAlignC) == int(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES));
static_assert(int(kPrefAlignD) == int(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES));

// Same number of parameters, each passed the same way (pointers and enums by their size) with the same
// result.
template <class A, class B>
constexpr bool passed_alike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
                              std::is_floating_point_v<A> == std::is_floating_point_v<B>;
template <class A, class B>
struct SameCall : std::false_type {};
template <class R, class S, class... A, class... B>
  requires(sizeof...(A) == sizeof...(B))
struct SameCall<R (*)(A...), S (*)(B...)>
    : std::bool_constant<(passed_alike<R, S> && ... && passed_alike<A, B>)> {};

static_assert(SameCall<decltype(Api::create), decltype(&cublasLtCreate)>::value);
static_assert(SameCall<decltype(Api::matmul_desc_create), decltype(&cublasLtMatmulDescCreate)>::value);
static_assert(SameCall<decltype(Api::matmul_desc_set), decltype(&cublasLtMatmulDescSetAttribute)>::value);
static_assert(SameCall<decltype(Api::matmul_desc_destroy), decltype(&cublasLtMatmulDescDestroy)>::value);
static_assert(SameCall<decltype(Api::layout_destroy), decltype(&cublasLtMatrixLayoutDestroy)>::value);
static_assert(SameCall<decltype(Api::layout_create), decltype(&cublasLtMatrixLayoutCreate)>::value);
static_assert(SameCall<decltype(Api::preference_create), decltype(&cublasLtMatmulPreferenceCreate)>::value);
static_assert(
    SameCall<decltype(Api::preference_set), decltype(&cublasLtMatmulPreferenceSetAttribute)>::value);
static_assert(SameCall<decltype(Api::preference_destroy), decltype(&cublasLtMatmulPreferenceDestroy)>::value);
static_assert(SameCall<decltype(Api::heuristic), decltype(&cublasLtMatmulAlgoGetHeuristic)>::value);
static_assert(SameCall<decltype(Api::algo_check), decltype(&cublasLtMatmulAlgoCheck)>::value);
static_assert(SameCall<decltype(Api::algo_get), decltype(&cublasLtMatmulAlgoConfigGetAttribute)>::value);
static_assert(SameCall<decltype(Api::matmul), decltype(&cublasLtMatmul)>::value);

}  // namespace
}  // namespace tigon::cuda::lt
