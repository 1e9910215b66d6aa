// C[M, N] = A[M, K] B[N, K]^T as a call brings it.
#ifndef FIBC_CUTLASS_LAUNCH_GEMM_H
#define FIBC_CUTLASS_LAUNCH_GEMM_H

#include <stdint.h>

#include "fibc/kernel_abi.h"

namespace fibc {
namespace cutlass_launch {
namespace {

// Where a definition has its tensors.
struct Positions {
  int a;
  int b;
  int c;
};

// Sizes and strides of rows in elements.
struct Gemm {
  void* a;
  void* b;
  void* c;
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t a_stride;
  int64_t b_stride;
  int64_t c_stride;
};

[[nodiscard]] inline Gemm gemm_of(const fibc_call& call, Positions at) noexcept {
  const fibc_tensor& a = call.inputs[at.a];
  const fibc_tensor& b = call.inputs[at.b];
  const fibc_tensor& c = call.outputs[at.c];
  Gemm gemm = {a.data, b.data, c.data, a.shape[0], b.shape[0], b.shape[1], a.strides[0], b.strides[0], c.strides[0]};
  if (gemm.m == 1) gemm.a_stride = gemm.k;  // the stride of an axis of size 1 may be anything
  if (gemm.m == 1) gemm.c_stride = gemm.n;
  if (gemm.n == 1) gemm.b_stride = gemm.k;
  return gemm;
}

// Whether every row begins at a multiple of 16 bytes, as tensor maps and vectors of 16 bytes need it, and every size is
// one that the kernel computes with.
[[nodiscard]] inline bool fits(const Gemm& gemm, int64_t elem_bytes) noexcept {
  constexpr int64_t kAlignment = 16;
  constexpr int64_t kMost = 0x7fffffff;
  const auto aligned = [&](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % kAlignment == 0 && stride * elem_bytes % kAlignment == 0;
  };
  return gemm.m <= kMost && gemm.n <= kMost && gemm.k <= kMost && aligned(gemm.a, gemm.a_stride) &&
         aligned(gemm.b, gemm.b_stride) && aligned(gemm.c, gemm.c_stride);
}

}  // namespace
}  // namespace cutlass_launch
}  // namespace fibc

#endif
