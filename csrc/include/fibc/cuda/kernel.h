// A kernel's code in this process: loaded once per device, found without a lock.
#ifndef FIBC_CUDA_KERNEL_H
#define FIBC_CUDA_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include <atomic>

#include "fibc/cuda/driver.h"
#include "fibc/kernel_abi.h"

namespace fibc {
namespace cuda {
namespace {

inline constexpr int32_t kMaxDevices = 64;  // ordinals of one process; a machine of today has at most 16

inline constexpr int32_t kPlainSharedBytes = 48 * 1024;  // more dynamic shared memory must be asked for

// Device code: a cubin, or PTX text that ends with a zero byte.
struct Image {
  const unsigned char* code;
  size_t size;
  const char* function;
  int32_t shared_bytes;             // dynamic shared memory of a launch
  bool large_cluster = false;       // clusters of more than 8 blocks, which not every device of the arch can run
};

[[nodiscard]] inline int32_t status_of(Result result) noexcept {
  return result == kSuccess ? FIBC_OK : is_refusal(result) ? FIBC_DECLINED : FIBC_DEVICE_ERROR;
}

// One per variant, a constant-initialised static. Modules stay loaded for good.
class Kernel {
 public:
  explicit constexpr Kernel(const Image& image) noexcept : image_(image) {}

  [[nodiscard]] const Image& image() const noexcept { return image_; }

  // The function on `device`; null where it is not loaded there.
  [[nodiscard]] Function function(int32_t device) const noexcept {
    return is_ordinal(device) ? functions_[device].load(std::memory_order_acquire) : nullptr;
  }

  // Loads the code on `device`, whose primary context is current. Returns FIBC_*.
  [[nodiscard]] int32_t prepare(int32_t device) noexcept {
    if (!is_ordinal(device)) return FIBC_DECLINED;
    if (function(device) != nullptr) return FIBC_OK;
    const Driver* api = driver();
    if (api == nullptr) return FIBC_DECLINED;
    Module module = nullptr;
    Result result = api->module_load_data(&module, image_.code);
    if (result != kSuccess) return status_of(result);
    Function loaded = nullptr;
    result = get_function(*api, module, loaded);
    Function none = nullptr;
    if (result != kSuccess || !functions_[device].compare_exchange_strong(none, loaded)) {
      (void)api->module_unload(module);  // another thread was first, or it is of no use
    }
    return status_of(result);
  }

 private:
  [[nodiscard]] static constexpr bool is_ordinal(int32_t device) noexcept { return 0 <= device && device < kMaxDevices; }

  [[nodiscard]] Result get_function(const Driver& api, Module module, Function& function) const noexcept {
    Result result = api.module_get_function(&function, module, image_.function);
    if (result == kSuccess && image_.shared_bytes > kPlainSharedBytes) {
      result = api.func_set_attribute(function, kMaxDynamicSharedSizeBytes, image_.shared_bytes);
    }
    if (result == kSuccess && image_.large_cluster) {
      result = api.func_set_attribute(function, kNonPortableClusterSizeAllowed, 1);
    }
    // Under lazy loading the first launch would load, and may not where it is captured.
    if (result == kSuccess && api.func_load != nullptr) result = api.func_load(function);
    return result;
  }

  Image image_;
  std::atomic<Function> functions_[kMaxDevices] = {};
};

}  // namespace
}  // namespace cuda
}  // namespace fibc

#endif
