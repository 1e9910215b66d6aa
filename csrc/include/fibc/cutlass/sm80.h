// CUTLASS 2.x for sm_80 to sm_89: what a GEMM on tensor cores with asynchronous copies needs.
#ifndef FIBC_CUTLASS_SM80_H
#define FIBC_CUTLASS_SM80_H

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/gemm_enumerated_types.h"
#include "cutlass/gemm/kernel/default_gemm_universal.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_types.h"

#endif
