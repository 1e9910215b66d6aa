// CUTLASS 3.x: what a GEMM of the collective builder needs.
#ifndef FIBC_CUTLASS_SM90_H
#define FIBC_CUTLASS_SM90_H

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#endif
