// What a call on a GPU needs beside its arguments: a prepared device, its context, the current stream, a workspace.
#ifndef FIBC_ENTRY_CUDA_CALLS_H
#define FIBC_ENTRY_CUDA_CALLS_H

#include <cstdint>
#include <utility>

#include "fibc/call.h"
#include "fibc/cuda/runtime/devices.h"
#include "fibc/cuda/driver.h"
#include "fibc/cuda/runtime/workspaces.h"
#include "fibc/dispatch.h"
#include "fibc/entry/ref.h"
#include "fibc/entry/tensor_adapter.h"
#include "fibc/parallel.h"
#include "fibc/reason.h"
#include "fibc/table.h"

namespace fibc {
namespace {

// A tensor of bytes.
struct TensorMemory {
  Ref tensor;
  void* address = nullptr;

  [[nodiscard]] void* data() const noexcept { return address; }
};

// One per module; the GIL is held in every call.
class CudaCalls {
 public:
  // Looks for the driver; false where there is none. Initialises nothing.
  [[nodiscard]] bool start() noexcept {
    api_ = cuda::driver();
    return api_ != nullptr;
  }

  [[nodiscard]] const cuda::Driver* driver() const noexcept { return api_; }
  [[nodiscard]] const cuda::Devices& devices() const noexcept { return devices_; }

  // Why no variant can serve on GPU `index`; kUnprepared where that is not known yet.
  [[nodiscard]] Reason state(std::int32_t index) const noexcept {
    // The driver is of no use in a child of a process that had it at work; a child that begins with it is well.
    if (forks_at_start_ != kNotStarted && forks_at_start_ != num_forks()) return Reason::kForked;
    return devices_.state(index);
  }

  // Why variant number `variant` cannot serve on GPU `index`, alike.
  [[nodiscard]] Reason state(std::int32_t index, std::int32_t variant) const noexcept {
    const Reason now = state(index);
    return now == Reason::kHit && devices_.has_declined(index, variant) ? Reason::kLoad : now;
  }

  // Loads what GPU `index` lacks and returns its state; `validity` null: whatever silicon it has. Not while the current
  // stream there is captured: kUnprepared. kDeviceError where the GPU reported an error, which the caller raises.
  [[nodiscard]] Reason prepare(const TensorAdapter& adapter, std::int32_t index, const CudaValidity* validity,
                               bool accept_gpu, Span<Variant> variants) noexcept {
    if (const Reason now = state(index); now != Reason::kUnprepared) return now;
    if (api_ == nullptr) return Reason::kDriver;
    void* stream = nullptr;
    cuda::Capture capture;
    if (is_running() && adapter.current_stream(index, stream)) {
      if (cuda::read_capture(*api_, stream, capture) == Reason::kStream || capture.active) return Reason::kUnprepared;
    }
    if (forks_at_start_ == kNotStarted) forks_at_start_ = num_forks();
    const Reason now = devices_.prepare(*api_, index, validity, accept_gpu, variants);
    return now == Reason::kBroken ? Reason::kDeviceError : now;
  }

  // What `prepare` would say of the silicon, with nothing loaded.
  [[nodiscard]] Reason foresee(std::int32_t index, const CudaValidity& validity, bool accept_gpu) const noexcept {
    const Reason now = state(index);
    return now == Reason::kUnprepared ? devices_.foresee(*api_, index, validity, accept_gpu) : now;
  }

  // Loads one more variant on a prepared GPU.
  [[nodiscard]] Reason load(const Variant& variant, std::int32_t index) noexcept {
    const cuda::DeviceRecord& device = devices_[index];
    cuda::CurrentContext current(*api_);
    if (!current.enter(device.context, device.device)) return Reason::kContext;
    const cuda::RelaxedCapture relaxed(*api_);
    const std::int32_t status = variant.prepare(index);
    if (status == FIBC_OK) return Reason::kHit;
    if (status != FIBC_DEVICE_ERROR) return Reason::kLoad;
    devices_.break_off(*api_, index, 0, nullptr);
    return Reason::kDeviceError;
  }

  // Sets RuntimeError for what GPU `index` reported beside a variant.
  void raise_error(const char* definition, const char* symbol, std::int32_t index) const noexcept {
    const cuda::Result error = devices_[index].error;
    const char* name = nullptr;
    const char* text = nullptr;
    if (error == cuda::kSuccess || api_->get_error_name(error, &name) != cuda::kSuccess) name = "an error";
    if (api_->get_error_string(error, &text) != cuda::kSuccess || error == cuda::kSuccess) text = "that it does not name";
    PyErr_Format(PyExc_RuntimeError,
                 "%s: %s on cuda:%d: the GPU reported %s (%s) at this launch, of this kernel or of one before it; nothing "
                 "runs on it in this process any more (start another one; CUDA_LAUNCH_BLOCKING=1 names the kernel)",
                 definition, symbol, static_cast<int>(index), name, text);
  }

  // Launches `variant`, number `number` of its table, on the call's prepared GPU. kHit: it is enqueued; kDeviceError: the
  // breaker is open, and the caller calls `raise_error`; else nothing was launched.
  [[nodiscard]] Reason launch(const TensorAdapter& adapter, const Variant& variant, std::int32_t number,
                              const Call& call) noexcept {
    const std::int32_t index = call.place.index;
    const cuda::DeviceRecord& device = devices_[index];
    cuda::CurrentContext current(*api_);
    if (!current.enter(device.context, device.device)) return Reason::kContext;
    fibc_cuda gpu{nullptr, index, 0, nullptr, nullptr};
    if (!adapter.current_stream(index, gpu.stream)) return Reason::kStream;
    const fibc_call bound = kernel_call(call, parallel, &gpu);
    Workspaces::Lease lease;
    if (const std::int64_t bytes = variant.workspace(&bound); bytes != 0) {
      const Reason taken = bytes < 0 ? Reason::kKernel : take(adapter, bytes, gpu, lease);
      if (taken != Reason::kHit) return taken;
    }
    const std::int32_t status = variant.entry(&bound);
    if (status == FIBC_OK) return Reason::kHit;
    if (status != FIBC_DEVICE_ERROR) return Reason::kKernel;
    devices_.break_off(*api_, index, number, gpu.stream);
    return Reason::kDeviceError;
  }

 private:
  using Workspaces = cuda::Workspaces<TensorMemory>;

  static constexpr std::int32_t kNotStarted = -1;

  [[nodiscard]] static std::int32_t num_forks() noexcept {
    return parallel_runtime().num_forks.load(std::memory_order_relaxed);
  }

  // Whether a context exists in this process's thread: without one nothing can be captured, and asking torch for its
  // stream would create one.
  [[nodiscard]] bool is_running() const noexcept {
    cuda::Context now = nullptr;
    return api_->ctx_get_current(&now) == cuda::kSuccess && now != nullptr;
  }

  [[nodiscard]] Reason take(const TensorAdapter& adapter, std::int64_t bytes, fibc_cuda& gpu,
                            Workspaces::Lease& lease) noexcept {
    cuda::Capture capture;
    Reason reason = cuda::read_capture(*api_, gpu.stream, capture);
    if (reason != Reason::kHit) return reason;
    const auto allocate = [&adapter, &gpu](std::int64_t size) noexcept {
      std::int64_t shape[] = {size};
      constexpr std::int64_t kStrides[] = {1};
      TensorMemory memory;
      memory.tensor = adapter.empty(dtype_of("uint8"), 1, shape, kStrides, {kCudaDevice, gpu.device}, memory.address);
      return memory;
    };
    reason = workspaces_.take(*api_, gpu.device, gpu.stream, capture, bytes, allocate, lease);
    gpu.capturing = capture.active ? 1 : 0;
    gpu.counters = lease.counters;
    gpu.scratch = lease.scratch;
    return reason;
  }

  const cuda::Driver* api_ = nullptr;
  cuda::Devices devices_;
  Workspaces workspaces_;
  std::int32_t forks_at_start_ = kNotStarted;  // when the driver was first put to work
};

}  // namespace
}  // namespace fibc

#endif
