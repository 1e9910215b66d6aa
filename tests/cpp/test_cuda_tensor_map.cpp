// Tensor maps: axes in the driver's order, equal specs encoded once, the cache bounded, pointers of one launch valid.
#include <cstdint>
#include <cstring>

#include "check.h"
#include "fake_driver.h"
#include "fibc/cuda/tensor_map.h"

using namespace fibc;
using fibc_tests::FakeDriver;

namespace {

constexpr std::int64_t kShape[] = {100, 4096};
constexpr std::int64_t kStrides[] = {8192, 2};
constexpr std::uint32_t kBox[] = {128, 64};

cuda::TensorMapSpec spec_at(std::uint64_t address) {
  return {reinterpret_cast<void*>(address), cuda::TensorMapType::kBfloat16, 2, kShape, kStrides, kBox,
          cuda::Swizzle::k128Bytes};
}

std::uint64_t word(const cuda::TensorMap* map, int index) {
  std::uint64_t value = 0;
  std::memcpy(&value, map->bytes + 8 * index, sizeof value);
  return value;
}

void axes_are_reversed_for_the_driver() {
  FakeDriver driver;
  driver.install();
  const cuda::TensorMap* map = cuda::tensor_map(spec_at(0x1000));
  CHECK(map != nullptr && reinterpret_cast<std::uint64_t>(map) % 64 == 0);
  CHECK(word(map, 0) == 9 && word(map, 1) == 2 && word(map, 2) == 0x1000);
  CHECK(word(map, 3) == 4096 && word(map, 4) == 100);  // shape, innermost first
  CHECK(word(map, 8) == 64 && word(map, 9) == 128);    // box
  CHECK(word(map, 13) == 8192 && word(map, 14) == 3);  // stride of the outer axis, swizzle
}

void an_equal_spec_is_encoded_once() {
  FakeDriver driver;
  driver.install();
  const cuda::TensorMap* map = cuda::tensor_map(spec_at(0x2000));
  CHECK(cuda::tensor_map(spec_at(0x2000)) == map && driver.num_encoded == 1);
  cuda::TensorMapSpec other = spec_at(0x2000);
  constexpr std::int64_t kLonger[] = {101, 4096};
  other.shape = kLonger;
  CHECK(cuda::tensor_map(other) != map && driver.num_encoded == 2);
  other.fill = cuda::Fill::kNanRequestZeroFma;
  CHECK(cuda::tensor_map(other) != map && driver.num_encoded == 3);
  CHECK(cuda::tensor_map(spec_at(0x2000)) == map && driver.num_encoded == 3);
}

// 80 layers of weights that come round again, each with its activation: what a decode step asks for.
void the_weights_of_a_model_stay() {
  FakeDriver driver;
  driver.install();
  const auto step = [] {
    for (std::uint64_t layer = 0; layer < 80; ++layer) {
      CHECK(word(cuda::tensor_map(spec_at(0x7f0000000000 + layer * (33 << 20))), 2) == 0x7f0000000000 + layer * (33 << 20));
      CHECK(word(cuda::tensor_map(spec_at(0x7e0000000000)), 2) == 0x7e0000000000);
    }
  };
  step();
  const int first = driver.num_encoded;
  step();
  CHECK(first == 81);
  CHECK(driver.num_encoded - first <= 8);  // sets fill unevenly, so that a few go (8)
}

// Whatever was asked before, the maps of one launch hold until the last of them is asked for.
void eight_maps_of_a_launch_hold_together() {
  FakeDriver driver;
  driver.install();
  std::uint64_t seed = 1;
  for (int launch = 0; launch < 2000; ++launch) {
    const cuda::TensorMap* maps[8];
    std::uint64_t addresses[8];
    for (int i = 0; i < 8; ++i) {
      seed = seed * 6364136223846793005 + 1442695040888963407;
      addresses[i] = 0x10000 + (seed >> 52) * 256;
      maps[i] = cuda::tensor_map(spec_at(addresses[i]));
    }
    for (int i = 0; i < 8; ++i) CHECK(word(maps[i], 2) == addresses[i]);
  }
  CHECK(driver.num_encoded > 2000);  // 4096 addresses: more than the cache holds
}

void what_the_driver_refuses_is_not_cached() {
  FakeDriver driver;
  driver.install();
  driver.encode_result = cuda::kInvalidValue;
  CHECK(cuda::tensor_map(spec_at(0x9000)) == nullptr);
  driver.encode_result = cuda::kSuccess;
  CHECK(cuda::tensor_map(spec_at(0x9000)) != nullptr);
  cuda::TensorMapSpec flat = spec_at(0x9000);
  flat.rank = 0;
  CHECK(cuda::tensor_map(flat) == nullptr);
  flat.rank = 6;
  CHECK(cuda::tensor_map(flat) == nullptr);
  driver.table().tensor_map_encode_tiled = nullptr;
  CHECK(cuda::tensor_map(spec_at(0x9000)) == nullptr);
  cuda::set_driver(nullptr);
  CHECK(cuda::tensor_map(spec_at(0x9000)) == nullptr);
}

}  // namespace

int main() {
  axes_are_reversed_for_the_driver();
  an_equal_spec_is_encoded_once();
  the_weights_of_a_model_stay();
  eight_maps_of_a_launch_hold_together();
  what_the_driver_refuses_is_not_cached();
  return fibc_tests::failures != 0;
}
