// Workspaces: one per (GPU, stream), grown, bounded; in a graph counters without a memset, scratch that goes back.
#include <utility>
#include <vector>

#include "check.h"
#include "fake_driver.h"
#include "fibc/cuda/runtime/workspaces.h"

using namespace fibc;
using fibc_tests::FakeDriver;

namespace {

int num_alive = 0;
std::vector<std::int64_t> allocated_bytes;

// Device memory that is never touched.
class Memory {
 public:
  Memory() = default;
  explicit Memory(std::uint64_t address) : address_(address) { ++num_alive; }
  Memory(Memory&& other) noexcept : address_(std::exchange(other.address_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(address_, other.address_);
    return *this;
  }
  ~Memory() {
    if (address_ != 0) --num_alive;
  }
  [[nodiscard]] void* data() const { return reinterpret_cast<void*>(address_); }

 private:
  std::uint64_t address_ = 0;
};

using Workspaces = cuda::Workspaces<Memory>;

cuda::Stream stream_at(int number) { return reinterpret_cast<cuda::Stream>(static_cast<std::uintptr_t>(number)); }

struct Example {
  FakeDriver driver;
  Workspaces workspaces;
  bool has_memory = true;

  Example() {
    num_alive = 0;
    allocated_bytes.clear();
  }

  Reason take(int gpu, int stream, std::int64_t bytes, Workspaces::Lease& lease) {
    const auto allocate = [this](std::int64_t size) {
      if (!has_memory) return Memory();
      allocated_bytes.push_back(size);
      return Memory(std::uint64_t{1} << 40 | allocated_bytes.size() << 30);
    };
    cuda::Capture capture;
    const Reason read = cuda::read_capture(driver.table(), stream_at(stream), capture);
    if (read != Reason::kHit) return read;
    return workspaces.take(driver.table(), gpu, stream_at(stream), capture, bytes, allocate, lease);
  }

  // The counters of a call, with all laws of a workspace checked.
  void* counters(int gpu, int stream, std::int64_t bytes) {
    Workspaces::Lease lease;
    CHECK(take(gpu, stream, bytes, lease) == Reason::kHit);
    CHECK(lease.counters != nullptr && lease.scratch != nullptr && lease.counters != lease.scratch);
    return lease.counters;
  }
};

void each_stream_of_each_gpu_has_its_own() {
  Example e;
  void* first = e.counters(0, 1, 1000);
  CHECK(e.counters(0, 1, 1000) == first && e.counters(0, 1, 1) == first);
  CHECK(e.counters(0, 2, 1000) != first && e.counters(1, 1, 1000) != first);
  CHECK(num_alive == 3 && e.driver.memsets.size() == 3);
  CHECK(e.driver.memsets[0].bytes == FIBC_COUNTER_BYTES && e.driver.memsets[0].stream == stream_at(1));
  CHECK(reinterpret_cast<void*>(e.driver.memsets[0].address) == first);
  Workspaces::Lease lease;
  CHECK(e.take(0, 1, 1000, lease) == Reason::kHit);
  CHECK(static_cast<char*>(lease.scratch) - static_cast<char*>(lease.counters) == FIBC_COUNTER_BYTES);
}

void one_that_is_too_small_grows() {
  Example e;
  void* small = e.counters(0, 1, 1);
  CHECK(allocated_bytes.back() == FIBC_COUNTER_BYTES + Workspaces::kGranularityBytes);
  CHECK(e.counters(0, 1, Workspaces::kGranularityBytes) == small);
  void* large = e.counters(0, 1, Workspaces::kGranularityBytes + 1);
  CHECK(large != small && allocated_bytes.back() == FIBC_COUNTER_BYTES + 2 * Workspaces::kGranularityBytes);
  CHECK(num_alive == 1 && e.driver.memsets.size() == 2);
  CHECK(e.counters(0, 1, 5) == large);
}

void their_number_is_bounded_and_the_oldest_goes() {
  Example e;
  for (int stream = 1; stream <= Workspaces::kMaxStreams; ++stream) (void)e.counters(0, stream, 1);
  void* kept = e.counters(0, 1, 1);  // used again: now stream 2 is the oldest
  (void)e.counters(0, 100, 1);
  CHECK(num_alive == Workspaces::kMaxStreams);
  CHECK(e.counters(0, 1, 1) == kept);
  const std::size_t before = allocated_bytes.size();
  (void)e.counters(0, 2, 1);
  CHECK(allocated_bytes.size() == before + 1);
}

// A stream that takes the handle of a destroyed one is another stream.
void a_stream_is_known_by_its_id() {
  Example e;
  void* first = e.counters(0, 1, 1);
  e.driver.table().stream_get_id = [](cuda::Stream, unsigned long long* id) {
    *id = 77;
    return cuda::Result{cuda::kSuccess};
  };
  CHECK(e.counters(0, 1, 1) != first);
  Example old;
  old.driver.table().stream_get_id = nullptr;
  first = old.counters(0, 1, 1);
  CHECK(old.counters(0, 1, 1) == first && old.counters(0, 2, 1) != first);
}

void no_memory_is_a_reason() {
  Example e;
  e.has_memory = false;
  Workspaces::Lease lease;
  CHECK(e.take(0, 1, 1000, lease) == Reason::kWorkspace);
  e.driver.captures[stream_at(1)] = 5;
  CHECK(e.take(0, 1, 1000, lease) == Reason::kWorkspace);
  e.has_memory = true;
  e.driver.captures.clear();
  (void)e.counters(0, 1, 1000);
}

void a_graph_keeps_its_counters_and_gives_scratch_back() {
  Example e;
  void* eager = e.counters(0, 1, 1000);
  e.driver.captures[stream_at(1)] = 5;
  e.driver.memsets.clear();
  void* counters = nullptr;
  {
    Workspaces::Lease lease;
    CHECK(e.take(0, 1, 1000, lease) == Reason::kHit);
    CHECK(lease.counters != eager && allocated_bytes.back() == 1000 && num_alive == 2);
    counters = lease.counters;
  }
  CHECK(num_alive == 1);  // the framework may use the scratch again behind this call
  CHECK(e.driver.memsets.size() == 1 && e.driver.memsets[0].stream != stream_at(1));  // nothing in the graph
  CHECK(e.driver.memsets[0].bytes == std::size_t{32} * FIBC_COUNTER_BYTES && e.driver.capture_mode == 0);
  CHECK(e.counters(0, 1, 1000) == counters && e.driver.graphs[5].size() == 1);

  e.driver.captures[stream_at(2)] = 5;  // forked into the same graph: runs beside the first
  void* forked = e.counters(0, 2, 1000);
  e.driver.captures[stream_at(1)] = 6;
  void* other = e.counters(0, 1, 1000);
  CHECK(forked != counters && other != counters && other != forked);
  CHECK(e.driver.num_allocated == 1);

  e.driver.destroy_graph(5);
  e.driver.captures[stream_at(1)] = 7;
  void* again = e.counters(0, 1, 1000);
  CHECK(again == counters || again == forked);
  CHECK(e.driver.num_allocated == 1 && e.driver.memsets.size() == 1);
}

void graphs_of_another_gpu_have_counters_there() {
  Example e;
  e.driver.captures[stream_at(1)] = 5;
  void* here = e.counters(0, 1, 1);
  e.driver.captures[stream_at(2)] = 6;
  void* there = e.counters(1, 2, 1);
  CHECK(here != there && e.driver.num_allocated == 2);
}

void without_counters_to_give_a_graph_has_a_memset() {
  Example e;
  const int num_slots = cuda::GraphCounters::kMaxSlots;
  for (int graph = 1; graph <= num_slots; ++graph) {
    e.driver.captures[stream_at(1)] = static_cast<std::uint64_t>(graph);
    (void)e.counters(0, 1, 1);
  }
  const std::size_t before = e.driver.memsets.size();
  CHECK(before == static_cast<std::size_t>(num_slots / 32));
  e.driver.captures[stream_at(1)] = 100000;
  (void)e.counters(0, 1, 1000);
  CHECK(e.driver.memsets.size() == before + 1 && e.driver.memsets.back().stream == stream_at(1));
  CHECK(e.driver.memsets.back().bytes == FIBC_COUNTER_BYTES && allocated_bytes.back() == FIBC_COUNTER_BYTES + 1000);
  CHECK(num_alive == 0);

  Example old;
  old.driver.table().user_object_create = nullptr;
  old.driver.captures[stream_at(1)] = 5;
  (void)old.counters(0, 1, 1000);
  CHECK(old.driver.memsets.size() == 1 && old.driver.memsets[0].stream == stream_at(1));
}

void a_capture_that_has_failed_is_a_reason() {
  Example e;
  e.driver.table().stream_is_capturing = [](cuda::Stream, int* status) {
    *status = 2;
    return cuda::Result{cuda::kSuccess};
  };
  Workspaces::Lease lease;
  CHECK(e.take(0, 1, 1000, lease) == Reason::kStream);
  e.driver.table().stream_is_capturing = [](cuda::Stream, int*) { return cuda::Result{cuda::kStreamCaptureImplicit}; };
  CHECK(e.take(0, 1, 1000, lease) == Reason::kStream);
}

}  // namespace

int main() {
  each_stream_of_each_gpu_has_its_own();
  one_that_is_too_small_grows();
  their_number_is_bounded_and_the_oldest_goes();
  a_stream_is_known_by_its_id();
  no_memory_is_a_reason();
  a_graph_keeps_its_counters_and_gives_scratch_back();
  graphs_of_another_gpu_have_counters_there();
  without_counters_to_give_a_graph_has_a_memset();
  a_capture_that_has_failed_is_a_reason();
  return fibc_tests::failures != 0;
}
