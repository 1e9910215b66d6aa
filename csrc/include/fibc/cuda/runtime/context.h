// A GPU's primary context, current in the calling thread for the length of a scope.
#ifndef FIBC_CUDA_RUNTIME_CONTEXT_H
#define FIBC_CUDA_RUNTIME_CONTEXT_H

#include "fibc/cuda/driver.h"

namespace fibc {
namespace cuda {
namespace {

// A thread that has used torch on a GPU has that GPU's primary context, and costs one look. Where another GPU is current,
// or none yet, the context is pushed for the call: what native would do, and cheaper than native. Another context on the
// same GPU (a green context, an application's own) is the caller's intent: such a call goes native.
class CurrentContext {
 public:
  explicit CurrentContext(const Driver& api) noexcept : api_(api) {}
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext() {
    Context popped = nullptr;
    if (pushed_) (void)api_.ctx_pop_current(&popped);
  }

  // False where `primary`, that of `device`, is not current now.
  [[nodiscard]] bool enter(Context primary, Device device) noexcept {
    Context now = nullptr;
    if (api_.ctx_get_current(&now) != kSuccess) return false;
    if (now == primary) return true;
    Device current = -1;
    if (now != nullptr && (api_.ctx_get_device(&current) != kSuccess || current == device)) return false;
    pushed_ = api_.ctx_push_current(primary) == kSuccess;
    return pushed_;
  }

 private:
  const Driver& api_;
  bool pushed_ = false;
};

// Lets the calling thread load code and allocate while another stream is captured, without spoiling that capture.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& api) noexcept : api_(api) { (void)api_.thread_exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { (void)api_.thread_exchange_capture_mode(&mode_); }

 private:
  const Driver& api_;
  int mode_ = kCaptureModeRelaxed;
};

}  // namespace
}  // namespace cuda
}  // namespace fibc

#endif
