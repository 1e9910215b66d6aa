// One call in flight: views of its arguments, its axes, its device, its thread count. Lives on the stack.
#ifndef FIBC_CALL_H
#define FIBC_CALL_H

#include <cstdint>
#include <type_traits>

#include "fibc/dtype.h"
#include "fibc/kernel_abi.h"
#include "fibc/table.h"

namespace fibc {

inline constexpr std::int32_t kOtherDevice = 0;
inline constexpr std::int32_t kCpuDevice = 1;   // DLPack's kDLCPU
inline constexpr std::int32_t kCudaDevice = 2;  // DLPack's kDLCUDA

inline constexpr std::int32_t kAnyIndex = -1;

// Where memory is. The index counts GPUs as the process sees them; it is 0 for every other type.
struct Place {
  std::int32_t type;
  std::int32_t index;
};

// What a view says beside data, shape and strides.
struct TensorFacts {
  DType dtype;
  std::int32_t rank;
  Place place;
};

// Arrays are left uninitialised: a call writes the entries that its spec has and reads no other.
struct Call {
  fibc_tensor inputs[kMaxTensors];
  fibc_tensor outputs[kMaxOutputs];
  TensorFacts input_facts[kMaxTensors];
  TensorFacts output_facts[kMaxOutputs];
  double scalars[kMaxTensors];
  std::int64_t axes[kMaxAxes];
  Place place;  // of every tensor
  std::int32_t num_threads;
};

static_assert(std::is_trivially_default_constructible_v<Call>);

[[nodiscard]] constexpr std::int64_t num_elems(const fibc_tensor& tensor, std::int32_t rank) noexcept {
  std::int64_t total = 1;
  for (std::int32_t d = 0; d < rank; ++d) total *= tensor.shape[d];
  return total;
}

}  // namespace fibc

#endif
