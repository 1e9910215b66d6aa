// How many multiprocessors a GPU has, asked once.
#ifndef FIBC_CUTLASS_LAUNCH_MULTIPROCESSORS_H
#define FIBC_CUTLASS_LAUNCH_MULTIPROCESSORS_H

#include <stdint.h>

#include <atomic>

#include "fibc/cuda/driver.h"
#include "fibc/cuda/kernel.h"

namespace fibc {
namespace cutlass_launch {
namespace {

inline std::atomic<int> multiprocessor_counts[cuda::kMaxDevices] = {};

// 0 where the driver does not say.
[[nodiscard]] inline int num_multiprocessors(int32_t device) noexcept {
  if (device < 0 || device >= cuda::kMaxDevices) return 0;
  int count = multiprocessor_counts[device].load(std::memory_order_relaxed);
  const cuda::Driver* api = cuda::driver();
  if (count != 0 || api == nullptr) return count;
  cuda::Device handle = -1;
  if (api->device_get(&handle, device) != cuda::kSuccess) return 0;
  if (api->device_get_attribute(&count, cuda::kMultiprocessorCount, handle) != cuda::kSuccess) return 0;
  multiprocessor_counts[device].store(count, std::memory_order_relaxed);
  return count;
}

}  // namespace
}  // namespace cutlass_launch
}  // namespace fibc

#endif
