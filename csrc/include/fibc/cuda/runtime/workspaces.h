// Counters and scratch of calls that need them: one workspace per (GPU, stream), others for calls that are captured.
#ifndef FIBC_CUDA_RUNTIME_WORKSPACES_H
#define FIBC_CUDA_RUNTIME_WORKSPACES_H

#include <cstdint>

#include "fibc/cuda/driver.h"
#include "fibc/cuda/runtime/graph_counters.h"
#include "fibc/kernel_abi.h"
#include "fibc/reason.h"

namespace fibc {
namespace cuda {
namespace {

[[nodiscard]] inline Reason read_capture(const Driver& api, Stream stream, Capture& capture) noexcept {
  int status = kCaptureNone;
  if (api.stream_is_capturing(stream, &status) != kSuccess) return Reason::kStream;
  if (status == kCaptureNone) return Reason::kHit;
  if (status != kCaptureActive) return Reason::kStream;
  capture.active = true;
  if (api.stream_get_capture_info == nullptr) return Reason::kHit;
  const Result result = api.stream_get_capture_info(stream, &status, &capture.id, &capture.graph, nullptr, nullptr);
  return result == kSuccess ? Reason::kHit : Reason::kStream;
}

// `Memory` owns device memory of the framework's allocator: default-constructed without any, movable, `data()`. Giving it
// back is safe as soon as everything that uses it is enqueued on the stream that was current when it was made. One thread
// at a time calls `take` (it holds the GIL).
template <class Memory>
class Workspaces {
 public:
  static constexpr std::int32_t kMaxStreams = 32;
  static constexpr std::int64_t kGranularityBytes = std::int64_t{1} << 19;

  // Memory of one call; it stays until the call is enqueued.
  struct Lease {
    void* counters = nullptr;
    void* scratch = nullptr;
    Memory own;
  };

  // `allocate(bytes)`: Memory on `device` for use on `stream`, the current one there; its data is null where there is none.
  template <class Allocate>
  [[nodiscard]] Reason take(const Driver& api, std::int32_t device, Stream stream, const Capture& capture,
                            std::int64_t scratch_bytes, const Allocate& allocate, Lease& lease) noexcept {
    return capture.active ? take_captured(api, device, stream, capture, scratch_bytes, allocate, lease)
                          : take_plain(api, device, stream, scratch_bytes, allocate, lease);
  }

 private:
  struct Entry {
    std::int32_t device = -1;
    std::uint64_t stream = 0;
    std::int64_t scratch_bytes = 0;
    std::uint64_t used = 0;
    Memory memory;
  };

  // A handle may come again after its stream is destroyed, while the old one's work still runs; an id does not.
  [[nodiscard]] static std::uint64_t identity_of(const Driver& api, Stream stream) noexcept {
    unsigned long long id = 0;
    if (api.stream_get_id != nullptr && api.stream_get_id(stream, &id) == kSuccess) return id;
    return reinterpret_cast<std::uint64_t>(stream);
  }

  static void lay_out(const Memory& memory, Lease& lease) noexcept {
    lease.counters = memory.data();
    lease.scratch = static_cast<char*>(memory.data()) + FIBC_COUNTER_BYTES;
  }

  [[nodiscard]] static bool clear_counters(const Driver& api, const Memory& memory, Stream stream) noexcept {
    const auto address = reinterpret_cast<DevicePtr>(memory.data());
    return address != 0 && api.memset_async(address, 0, FIBC_COUNTER_BYTES, stream) == kSuccess;
  }

  template <class Allocate>
  [[nodiscard]] Reason take_plain(const Driver& api, std::int32_t device, Stream stream, std::int64_t scratch_bytes,
                                  const Allocate& allocate, Lease& lease) noexcept {
    const std::uint64_t identity = identity_of(api, stream);
    Entry* entry = entries_;
    for (Entry& other : entries_) {
      if (other.device == device && other.stream == identity && other.scratch_bytes > 0) {
        entry = &other;
        break;
      }
      if (other.used < entry->used) entry = &other;
    }
    const bool mine = entry->device == device && entry->stream == identity;
    if (!mine || entry->scratch_bytes < scratch_bytes) {
      const std::int64_t rounded = (scratch_bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
      Memory memory = allocate(FIBC_COUNTER_BYTES + rounded);
      if (!clear_counters(api, memory, stream)) return Reason::kWorkspace;
      entry->device = device;
      entry->stream = identity;
      entry->scratch_bytes = rounded;
      entry->memory = static_cast<Memory&&>(memory);
    }
    entry->used = ++now_;
    lay_out(entry->memory, lease);
    return Reason::kHit;
  }

  // The framework gives memory that it may use again later in the same graph, so it goes back as soon as the call is
  // enqueued, and nothing in it lasts from one replay to the next.
  template <class Allocate>
  [[nodiscard]] Reason take_captured(const Driver& api, std::int32_t device, Stream stream, const Capture& capture,
                                     std::int64_t scratch_bytes, const Allocate& allocate, Lease& lease) noexcept {
    void* counters = capture.graph == nullptr ? nullptr : graph_counters_.get(api, device, stream, capture);
    lease.own = allocate(counters == nullptr ? FIBC_COUNTER_BYTES + scratch_bytes : scratch_bytes);
    if (lease.own.data() == nullptr) return Reason::kWorkspace;
    if (counters == nullptr) {
      if (!clear_counters(api, lease.own, stream)) return Reason::kWorkspace;
      lay_out(lease.own, lease);
    } else {
      lease.counters = counters;
      lease.scratch = lease.own.data();
    }
    return Reason::kHit;
  }

  Entry entries_[kMaxStreams];
  GraphCounters graph_counters_;
  std::uint64_t now_ = 0;
};

}  // namespace
}  // namespace cuda
}  // namespace fibc

#endif
