// cuBLASLt, as much of it as a stored algorithm needs: found in the copy that torch calls, declared here so that no CUDA
// header is needed. tests/cpp/test_cublaslt_header.cpp compares the declarations with cublasLt.h.
#ifndef FIBC_CUDA_CUBLASLT_H
#define FIBC_CUDA_CUBLASLT_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#include <atomic>

#include "fibc/cuda/driver.h"

namespace fibc {
namespace cuda {
namespace {

using LtHandle = void*;      // cublasLtHandle_t
using LtMatmulDesc = void*;  // cublasLtMatmulDesc_t
using LtStatus = int;        // cublasStatus_t

enum : LtStatus {
  kLtSuccess = 0,
  kLtNotInitialized = 1,
  kLtAllocFailed = 3,
  kLtInvalidValue = 7,
  kLtArchMismatch = 8,
  kLtNotSupported = 15,
};

enum class LtType : int { kFloat32 = 0, kFloat16 = 2, kBfloat16 = 14 };  // cudaDataType

// cublasComputeType_t. kFloat32 makes products of float32 in float32, and those of shorter types exactly; kTf32 rounds
// factors of float32 to tf32 first.
enum class LtCompute : int { kFloat32 = 68, kTf32 = 77 };

enum : int { kLtTransA = 3 };     // cublasLtMatmulDescAttributes_t; of B as well, the default is no transposition
enum : int32_t { kTransposed = 1 };  // cublasOperation_t

struct LtLayout {  // cublasLtMatrixLayoutOpaque_t; the library is told the size, and refuses where it needs more
  uint64_t data[8];
};

struct LtAlgo {  // cublasLtMatmulAlgo_t: "can be trivially serialized and later restored for use with the same version"
  uint64_t data[8];
};

struct LtResult {  // cublasLtMatmulHeuristicResult_t
  LtAlgo algo;
  size_t workspace_bytes;
  LtStatus state;
  float waves;
  int reserved[4];
};

struct CublasLt {
  size_t (*get_version)();
  LtStatus (*create)(LtHandle*);
  LtStatus (*destroy)(LtHandle);
  LtStatus (*desc_create)(LtMatmulDesc*, LtCompute, LtType scale);
  LtStatus (*desc_destroy)(LtMatmulDesc);
  LtStatus (*desc_set)(LtMatmulDesc, int attribute, const void* value, size_t bytes);
  LtStatus (*layout_init)(LtLayout*, size_t bytes, LtType, uint64_t rows, uint64_t cols, int64_t stride);
  LtStatus (*algo_check)(LtHandle, LtMatmulDesc, LtLayout* a, LtLayout* b, LtLayout* c, LtLayout* d, const LtAlgo*,
                         LtResult*);
  LtStatus (*matmul)(LtHandle, LtMatmulDesc, const void* alpha, const void* a, LtLayout* a_layout, const void* b,
                     LtLayout* b_layout, const void* beta, const void* c, LtLayout* c_layout, void* d, LtLayout* d_layout,
                     const LtAlgo*, void* workspace, size_t workspace_bytes, Stream);
};

// Reads the functions from an open library, or from what it depends on; false where one is missing.
[[nodiscard]] inline bool load(CublasLt& lt, void* library) noexcept {
  return find_function(library, lt.get_version, "cublasLtGetVersion") &&
         find_function(library, lt.create, "cublasLtCreate") && find_function(library, lt.destroy, "cublasLtDestroy") &&
         find_function(library, lt.desc_create, "cublasLtMatmulDescCreate") &&
         find_function(library, lt.desc_destroy, "cublasLtMatmulDescDestroy") &&
         find_function(library, lt.desc_set, "cublasLtMatmulDescSetAttribute") &&
         find_function(library, lt.layout_init, "cublasLtMatrixLayoutInit_internal") &&
         find_function(library, lt.algo_check, "cublasLtMatmulAlgoCheck") &&
         find_function(library, lt.matmul, "cublasLtMatmul");
}

struct CublasLtSlot {
  CublasLt functions;
  std::atomic<const CublasLt*> found;
  std::atomic<bool> searching;
};
inline CublasLtSlot cublaslt_slot = {};

// The library through which torch multiplies: a search from torch's own CUDA library meets the copy that this one is
// linked with, whatever else the process has loaded. Null where torch is not loaded or was built for the CPU; loads nothing.
[[nodiscard]] inline const CublasLt* cublaslt() noexcept {
  while (true) {
    if (const CublasLt* found = cublaslt_slot.found.load(std::memory_order_acquire); found != nullptr) return found;
    if (cublaslt_slot.searching.exchange(true, std::memory_order_acquire)) continue;
    void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    const bool complete = torch != nullptr && load(cublaslt_slot.functions, torch);
    if (complete) cublaslt_slot.found.store(&cublaslt_slot.functions, std::memory_order_release);
    cublaslt_slot.searching.store(false, std::memory_order_release);
    if (!complete) return nullptr;
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fibc

#endif
