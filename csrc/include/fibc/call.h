// One call in flight: views of its arguments, its axes, its thread count. Lives on the stack.
#ifndef FIBC_CALL_H
#define FIBC_CALL_H

#include <cstdint>

#include "fibc/dtype.h"
#include "fibc/kernel_abi.h"
#include "fibc/table.h"

namespace fibc {

inline constexpr std::int32_t kCpuDevice = 1;  // DLPack's kDLCPU

// What a view says beside data, shape and strides.
struct TensorFacts {
  DType dtype;
  std::int32_t rank;
  std::int32_t device_type;
};

// Arrays are left uninitialised: a call writes the entries that its spec has and reads no other.
struct Call {
  fibc_tensor inputs[kMaxTensors];
  fibc_tensor outputs[kMaxOutputs];
  TensorFacts input_facts[kMaxTensors];
  TensorFacts output_facts[kMaxOutputs];
  double scalars[kMaxTensors];
  std::int64_t axes[kMaxAxes];
  std::int32_t num_threads;
};

[[nodiscard]] constexpr std::int64_t num_elems(const fibc_tensor& tensor, std::int32_t rank) noexcept {
  std::int64_t total = 1;
  for (std::int32_t d = 0; d < rank; ++d) total *= tensor.shape[d];
  return total;
}

}  // namespace fibc

#endif
