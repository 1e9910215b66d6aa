// Lets the host's C++ compiler read CUTLASS's headers: a launcher needs what a kernel's parameters are, and builds them,
// without nvcc and without a CUDA runtime. Nothing of it is ever called or linked; include it before CUTLASS.
//
// nvcc's own host pass gives the same types: only what the headers look up by name in code that no launcher instantiates
// is declared here. The build compares the size of the parameters with what the cubin says.
#ifndef FIBC_CUTLASS_LAUNCH_HOST_PASS_H
#define FIBC_CUTLASS_LAUNCH_HOST_PASS_H

// CUTLASS reports on std::cerr. The real one needs libstdc++ and a static initialiser, which a kernel's object does not
// have: the include guard of <iostream> keeps it out, and this takes the words and drops them.
#define _GLIBCXX_IOSTREAM 1
#include <ostream>
namespace std {
struct fibc_silence {
  template <typename T>
  const fibc_silence& operator<<(const T&) const {
    return *this;
  }
  const fibc_silence& operator<<(std::ostream& (*)(std::ostream&)) const { return *this; }
};
static constexpr fibc_silence cerr{};
static constexpr fibc_silence cout{};
}  // namespace std

// Before the compiler's version is known: afterwards it would want nvcuda::wmma, which only nvcc has.
#include "cutlass/arch/wmma.h"

// What nvcc says of itself. CUTLASS takes its types of tensor maps and the alignment of vectors from it.
#include <cuda.h>
#define __CUDACC_VER_MAJOR__ (CUDA_VERSION / 1000)
#define __CUDACC_VER_MINOR__ (CUDA_VERSION / 10 % 100)

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <device_launch_parameters.h>

// Names of device functions in code that no launcher instantiates.
void __syncthreads();
int __syncthreads_and(int);
void __syncwarp(unsigned mask = 0xffffffffu);
void __threadfence();
int __dp4a(int, int, int);
unsigned __byte_perm(unsigned, unsigned, unsigned);
__half2 __hfma2(__half2, __half2, __half2);
template <typename T>
T __shfl_sync(unsigned, T, int, int = 32);
template <typename T>
T __shfl_up_sync(unsigned, T, unsigned, int = 32);
template <typename T>
T __shfl_down_sync(unsigned, T, unsigned, int = 32);
template <typename T>
T __shfl_xor_sync(unsigned, T, int, int = 32);

namespace cutlass {
namespace arch {
int LaneId();
int SmId();
}  // namespace arch
}  // namespace cutlass

#include "fibc/cutlass/launch/tensor_maps.h"

// What CUTLASS would ask the CUDA runtime, which is not there, where a launcher did not say it.
namespace fibc {
namespace cutlass_host {
namespace {
inline cudaError_t no_device(int*) { return cudaErrorNotSupported; }
inline cudaError_t no_attribute(int*, cudaDeviceAttr, int) { return cudaErrorNotSupported; }
}  // namespace
}  // namespace cutlass_host
}  // namespace fibc
#define cudaGetDevice fibc::cutlass_host::no_device
#define cudaDeviceGetAttribute fibc::cutlass_host::no_attribute

// CUTLASS asks the driver for tensor maps by this name; `func` stays as it is where the name is put together.
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL 1
#define cuTensorMapEncodeTiled fibc::cutlass_maps::encode

#endif
