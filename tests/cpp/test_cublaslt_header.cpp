// cuBLASLt as it is declared here is the one that cublasLt.h declares, wherever there is a cublasLt.h.
#include "fibc/cuda/cublaslt.h"
#include "fibc/cuda/cublaslt_gemm.h"

#if __has_include(<cublasLt.h>) && __has_include(<driver_types.h>)
#include <cublasLt.h>

#include <cstddef>
#include <type_traits>
#include <utility>

namespace {

using namespace fibc::cuda;

#define FIBC_SAME(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs), #theirs)
FIBC_SAME(kLtSuccess, CUBLAS_STATUS_SUCCESS);
FIBC_SAME(kLtNotInitialized, CUBLAS_STATUS_NOT_INITIALIZED);
FIBC_SAME(kLtAllocFailed, CUBLAS_STATUS_ALLOC_FAILED);
FIBC_SAME(kLtInvalidValue, CUBLAS_STATUS_INVALID_VALUE);
FIBC_SAME(kLtArchMismatch, CUBLAS_STATUS_ARCH_MISMATCH);
FIBC_SAME(kLtNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);
FIBC_SAME(LtType::kFloat32, CUDA_R_32F);
FIBC_SAME(LtType::kFloat16, CUDA_R_16F);
FIBC_SAME(LtType::kBfloat16, CUDA_R_16BF);
FIBC_SAME(LtCompute::kFloat32, CUBLAS_COMPUTE_32F);
FIBC_SAME(LtCompute::kTf32, CUBLAS_COMPUTE_32F_FAST_TF32);
FIBC_SAME(kLtTransA, CUBLASLT_MATMUL_DESC_TRANSA);
FIBC_SAME(kTransposed, CUBLAS_OP_T);
// What fibc/backends/cublaslt_probe.py and cublaslt_heuristic.py write as numbers.
FIBC_SAME(1, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
FIBC_SAME(3, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
FIBC_SAME(5, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
FIBC_SAME(8, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
FIBC_SAME(2, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
FIBC_SAME(0, CUBLASLT_ALGO_CONFIG_ID);
FIBC_SAME(1, CUBLASLT_ALGO_CONFIG_TILE_ID);
FIBC_SAME(2, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
FIBC_SAME(3, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
FIBC_SAME(4, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING);
FIBC_SAME(5, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION);
FIBC_SAME(6, CUBLASLT_ALGO_CONFIG_STAGES_ID);
FIBC_SAME(7, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID);
FIBC_SAME(8, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID);

static_assert(sizeof(LtLayout) >= sizeof(cublasLtMatrixLayoutOpaque_t));
static_assert(alignof(LtLayout) >= alignof(cublasLtMatrixLayoutOpaque_t));
static_assert(sizeof(LtAlgo) == sizeof(cublasLtMatmulAlgo_t) && alignof(LtAlgo) == alignof(cublasLtMatmulAlgo_t));
static_assert(sizeof(LtResult) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(LtResult, workspace_bytes) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(LtResult, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));
static_assert(offsetof(LtResult, waves) == offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));

// Parameters agree in number, and each in size: an enumeration is an int, a handle a pointer.
template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class Our, class... Ours, class Their, class... Theirs>
struct Alike<Our (*)(Ours...), Their(Theirs...)>
    : std::bool_constant<sizeof(Our) == sizeof(Their) && sizeof...(Ours) == sizeof...(Theirs) &&
                         std::is_same_v<std::integer_sequence<std::size_t, sizeof(Ours)...>,
                                        std::integer_sequence<std::size_t, sizeof(Theirs)...>>> {};

#define FIBC_ALIKE(ours, theirs) static_assert(Alike<decltype(CublasLt::ours), decltype(theirs)>::value, #theirs)
FIBC_ALIKE(get_version, cublasLtGetVersion);
FIBC_ALIKE(create, cublasLtCreate);
FIBC_ALIKE(destroy, cublasLtDestroy);
FIBC_ALIKE(desc_create, cublasLtMatmulDescCreate);
FIBC_ALIKE(desc_destroy, cublasLtMatmulDescDestroy);
FIBC_ALIKE(desc_set, cublasLtMatmulDescSetAttribute);
FIBC_ALIKE(layout_init, cublasLtMatrixLayoutInit_internal);
FIBC_ALIKE(algo_check, cublasLtMatmulAlgoCheck);
FIBC_ALIKE(matmul, cublasLtMatmul);

}  // namespace
#endif

int main() { return 0; }
