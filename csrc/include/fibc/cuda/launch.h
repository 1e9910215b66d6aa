// What a generated launcher includes: its kernel, a launch on the call's stream, tensor maps.
//
// A launcher is one translation unit, compiled by the host's C++ compiler alone:
//
//     alignas(16) constexpr unsigned char kCubin[] = {...};
//     fibc::cuda::Kernel kernel({kCubin, sizeof kCubin, "gemm", 98304});
//     extern "C" int32_t fibc_entry(const fibc_call* call) {
//       void* a = call->inputs[0].data;
//       int32_t m = static_cast<int32_t>(call->axes[0]);
//       void* parameters[] = {&a, &m};
//       return fibc::cuda::launch(kernel, *call, {{grid_of(m), 1, 1}, 128}, parameters);
//     }
//     extern "C" int64_t fibc_entry_workspace(const fibc_call*) { return 0; }
//     extern "C" int32_t fibc_entry_prepare(int32_t device) { return kernel.prepare(device); }
#ifndef FIBC_CUDA_LAUNCH_H
#define FIBC_CUDA_LAUNCH_H

#include <stdint.h>

#include "fibc/cuda/driver.h"
#include "fibc/cuda/kernel.h"
#include "fibc/cuda/tensor_map.h"
#include "fibc/kernel_abi.h"

namespace fibc {
namespace cuda {
namespace {

struct Launch {
  uint32_t grid[3];
  uint32_t threads;                   // of a block
  uint32_t cluster[3] = {1, 1, 1};    // blocks
  bool dependent = false;             // programmatic dependent launch: the kernel waits for what it depends on
};

// Launches and does not wait. `parameters`: a pointer to each of the kernel's parameters, which are copied. A device where
// the code is not loaded is prepared first, or declined where the stream is captured. Returns FIBC_*.
[[nodiscard]] inline int32_t launch(Kernel& kernel, const fibc_call& call, const Launch& launch,
                                    void** parameters) noexcept {
  const Driver* api = driver();
  if (call.cuda == nullptr || api == nullptr) return FIBC_DECLINED;
  Function function = kernel.function(call.cuda->device);
  if (function == nullptr) {
    if (call.cuda->capturing != 0) return FIBC_DECLINED;
    if (const int32_t status = kernel.prepare(call.cuda->device); status != FIBC_OK) return status;
    function = kernel.function(call.cuda->device);
  }
  LaunchAttribute attributes[2];
  unsigned num_attributes = 0;
  if (launch.cluster[0] * launch.cluster[1] * launch.cluster[2] != 1) {
    LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kAttributeClusterDimension;
    attribute.value.cluster = {launch.cluster[0], launch.cluster[1], launch.cluster[2]};
  }
  if (launch.dependent) {
    LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kAttributeProgrammaticStreamSerialization;
    attribute.value.programmatic_stream_serialization = 1;
  }
  const LaunchConfig config{launch.grid[0],
                            launch.grid[1],
                            launch.grid[2],
                            launch.threads,
                            1,
                            1,
                            static_cast<unsigned>(kernel.image().shared_bytes),
                            call.cuda->stream,
                            attributes,
                            num_attributes};
  return status_of(api->launch_kernel_ex(&config, function, parameters, nullptr));
}

}  // namespace
}  // namespace cuda
}  // namespace fibc

#endif
