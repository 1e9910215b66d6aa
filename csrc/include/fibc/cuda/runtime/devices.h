// What a module knows of each GPU: its silicon, its context, and whether the variants' code is loaded there.
#ifndef FIBC_CUDA_RUNTIME_DEVICES_H
#define FIBC_CUDA_RUNTIME_DEVICES_H

#include <atomic>
#include <cstdint>

#include "fibc/cuda/runtime/context.h"
#include "fibc/cuda/driver.h"
#include "fibc/cuda/kernel.h"
#include "fibc/reason.h"
#include "fibc/silicon.h"
#include "fibc/table.h"

namespace fibc {
namespace cuda {
namespace {

inline constexpr std::int32_t kMaxDeclined = 1024;  // variants that can decline one by one; a table has some dozens

// State is kUnprepared, then for good one of kHit (ready), kArch, kSilicon, kLoad, and from there kBroken. What stands
// beside it is written before it and read after it.
struct DeviceRecord {
  std::atomic<Reason> state{Reason::kUnprepared};
  Device device = -1;
  Context context = nullptr;
  Silicon silicon;
  Result error = kSuccess;  // what the driver said, where it said something
  std::int32_t variant = -1;  // the variant in question where state is kLoad or kBroken, or -1
  std::uint64_t declined[kMaxDeclined / 64] = {};  // a bit for each variant that did not load where others did
};

[[nodiscard]] inline Result read_silicon(const Driver& api, Device device, Silicon& out) noexcept {
  int major = 0;
  int minor = 0;
  int num_sms = 0;
  int l2_bytes = 0;
  size_t memory_bytes = 0;
  Result result = api.device_get_attribute(&major, kComputeCapabilityMajor, device);
  if (result == kSuccess) result = api.device_get_attribute(&minor, kComputeCapabilityMinor, device);
  if (result == kSuccess) result = api.device_get_attribute(&num_sms, kMultiprocessorCount, device);
  if (result == kSuccess) result = api.device_get_attribute(&l2_bytes, kL2CacheSize, device);
  if (result == kSuccess) result = api.device_total_mem(&memory_bytes, device);
  out = {10 * major + minor, num_sms, l2_bytes, static_cast<std::int64_t>(memory_bytes)};
  return result;
}

// One per module. One thread at a time calls `prepare` (it holds the GIL); `state` is for any.
class Devices {
 public:
  // Why no variant can serve on GPU `index`, kHit where one can.
  [[nodiscard]] Reason state(std::int32_t index) const noexcept {
    if (index < 0 || index >= kMaxDevices) return Reason::kDevice;
    return records_[index].state.load(std::memory_order_acquire);
  }

  // Whether a variant did not load on GPU `index`, whose state is kHit.
  [[nodiscard]] bool has_declined(std::int32_t index, std::int32_t variant) const noexcept {
    return variant < kMaxDeclined && (records_[index].declined[variant / 64] >> (variant % 64) & 1) != 0;
  }

  [[nodiscard]] const DeviceRecord& operator[](std::int32_t index) const noexcept { return records_[index]; }

  // Holds GPU `index` to `validity`, which null leaves out, and loads every variant there; one that declines (it calls a
  // library of another version, say) serves nothing there, and the others do. Creates the GPU's primary context where the
  // process has none yet. Returns the new state, or kContext, which leaves it unprepared.
  Reason prepare(const Driver& api, std::int32_t index, const CudaValidity* validity, bool accept_gpu,
                 Span<Variant> variants) noexcept {
    if (const Reason now = state(index); now != Reason::kUnprepared) return now;
    DeviceRecord& record = records_[index];
    Result result = api.init(0);
    if (result == kSuccess) result = api.device_get(&record.device, index);
    if (result == kSuccess) result = read_silicon(api, record.device, record.silicon);
    if (result != kSuccess) return settle(record, Reason::kLoad, result);
    if (validity != nullptr) {
      const Reason alike = check_silicon(*validity, record.silicon, accept_gpu);
      if (alike != Reason::kHit) return settle(record, alike, kSuccess);
    }
    if (record.context == nullptr) result = api.primary_ctx_retain(&record.context, record.device);
    if (result != kSuccess) return settle(record, Reason::kLoad, result);
    CurrentContext current(api);
    if (!current.enter(record.context, record.device)) return Reason::kContext;
    const RelaxedCapture relaxed(api);
    std::int32_t num_declined = 0;
    for (std::int32_t i = 0; i < variants.size; ++i) {
      const std::int32_t status = variants[i].prepare(index);
      if (status == FIBC_OK) continue;
      if (status == FIBC_DEVICE_ERROR || i >= kMaxDeclined) {
        record.variant = i;
        return settle(record, status == FIBC_DEVICE_ERROR ? Reason::kBroken : Reason::kLoad, kSuccess);
      }
      record.declined[i / 64] |= std::uint64_t{1} << (i % 64);
      ++num_declined;
    }
    if (num_declined == 0 || num_declined < variants.size) return settle(record, Reason::kHit, kSuccess);
    record.variant = 0;
    return settle(record, Reason::kLoad, kSuccess);
  }

  // What `prepare` would say of the silicon, with nothing loaded and nothing remembered.
  [[nodiscard]] static Reason foresee(const Driver& api, std::int32_t index, const CudaValidity& validity,
                                      bool accept_gpu) noexcept {
    Device device = -1;
    Silicon silicon;
    const bool read = api.init(0) == kSuccess && api.device_get(&device, index) == kSuccess &&
                      read_silicon(api, device, silicon) == kSuccess;
    return read ? check_silicon(validity, silicon, accept_gpu) : Reason::kLoad;
  }

  // Opens the breaker: an error came up when `variant` was launched on `stream`.
  void break_off(const Driver& api, std::int32_t index, std::int32_t variant, Stream stream) noexcept {
    DeviceRecord& record = records_[index];
    record.variant = variant;
    (void)settle(record, Reason::kBroken, api.stream_query(stream));  // an error of the device is told to every call
  }

 private:
  static Reason settle(DeviceRecord& record, Reason state, Result error) noexcept {
    record.error = error;
    record.state.store(state, std::memory_order_release);
    return state;
  }

  DeviceRecord records_[kMaxDevices];
};

}  // namespace
}  // namespace cuda
}  // namespace fibc

#endif
