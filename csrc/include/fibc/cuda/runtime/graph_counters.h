// Counters for kernels in CUDA graphs: zero when the graph is captured, left zero by each kernel, kept while it lives.
#ifndef FIBC_CUDA_RUNTIME_GRAPH_COUNTERS_H
#define FIBC_CUDA_RUNTIME_GRAPH_COUNTERS_H

#include <atomic>
#include <cstdint>

#include "fibc/cuda/runtime/context.h"
#include "fibc/cuda/driver.h"
#include "fibc/kernel_abi.h"

namespace fibc {
namespace cuda {
namespace {

// A stream's capture into a graph.
struct Capture {
  bool active = false;
  std::uint64_t id = 0;  // unique in the process
  Graph graph = nullptr;
};

// A memset of counters in the graph would be a node before each kernel and cost as much as a small kernel. So a graph has
// counters of its own, one set per captured stream, which the driver gives back when the graph and everything instantiated
// from it is gone. One thread at a time calls `get`.
class GraphCounters {
 public:
  static constexpr std::int32_t kSlotsPerBlock = 32;  // 2 MiB, the driver's granularity
  static constexpr std::int32_t kMaxSlots = 512;

  // Counters for what `stream` captures now; null where none are left, or the driver is too old.
  [[nodiscard]] void* get(const Driver& api, std::int32_t device, Stream stream, const Capture& capture) noexcept {
    if (api.user_object_create == nullptr || api.graph_retain_user_object == nullptr) return nullptr;
    Slot* free = nullptr;
    for (Slot* slot = slots_; slot < slots_ + num_slots_; ++slot) {
      if (slot->device != device) continue;
      if (!slot->taken.load(std::memory_order_acquire)) {
        free = slot;
      } else if (slot->capture == capture.id && slot->stream == stream) {
        return slot->data();
      }
    }
    if (free == nullptr) free = grow(api, device);
    if (free == nullptr || !hand_over(api, capture.graph, *free)) return nullptr;
    free->capture = capture.id;
    free->stream = stream;
    return free->data();
  }

 private:
  struct Slot {
    std::atomic<bool> taken{false};
    std::int32_t device = -1;
    std::uint64_t capture = 0;
    Stream stream = nullptr;
    DevicePtr address = 0;

    [[nodiscard]] void* data() const noexcept { return reinterpret_cast<void*>(address); }
  };

  // Called by the driver, on a thread of its own, which may not call the driver.
  static void release(void* slot) noexcept { static_cast<Slot*>(slot)->taken.store(false, std::memory_order_release); }

  // Ties the slot's life to the graph's.
  [[nodiscard]] static bool hand_over(const Driver& api, Graph graph, Slot& slot) noexcept {
    UserObject object = nullptr;
    slot.taken.store(true, std::memory_order_relaxed);
    if (api.user_object_create(&object, &slot, release, 1, kUserObjectNoDestructorSync) != kSuccess) {
      slot.taken.store(false, std::memory_order_relaxed);
      return false;
    }
    // Where the graph does not take it, the object and its slot are lost, which is safe.
    return api.graph_retain_user_object(graph, object, 1, kGraphUserObjectMove) == kSuccess;
  }

  // Adds a block of zeroed slots for `device` and returns one. The stream is captured: memory and memset must not be.
  [[nodiscard]] Slot* grow(const Driver& api, std::int32_t device) noexcept {
    if (num_slots_ + kSlotsPerBlock > kMaxSlots) return nullptr;
    const RelaxedCapture relaxed(api);
    constexpr std::size_t kBytes = std::size_t{kSlotsPerBlock} * FIBC_COUNTER_BYTES;
    Stream stream = nullptr;
    DevicePtr block = 0;
    // Stream and memory stay: this happens once per 32 graphs.
    if (api.stream_create(&stream, kStreamNonBlocking) != kSuccess || api.mem_alloc(&block, kBytes) != kSuccess ||
        api.memset_async(block, 0, kBytes, stream) != kSuccess || api.stream_synchronize(stream) != kSuccess) {
      return nullptr;
    }
    Slot* first = slots_ + num_slots_;
    for (std::int32_t i = 0; i < kSlotsPerBlock; ++i) {
      first[i].device = device;
      first[i].address = block + static_cast<DevicePtr>(i) * FIBC_COUNTER_BYTES;
    }
    num_slots_ += kSlotsPerBlock;
    return first;
  }

  Slot slots_[kMaxSlots];
  std::int32_t num_slots_ = 0;
};

}  // namespace
}  // namespace cuda
}  // namespace fibc

#endif
