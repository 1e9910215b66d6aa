// Loading and launching: once per device, attributes as asked, what is declined and what is an error.
#include "check.h"
#include "fake_driver.h"
#include "fibc/cuda/launch.h"

using namespace fibc;
using fibc_tests::FakeDriver;

namespace {

constexpr unsigned char kCode[16] = {1, 2, 3};
const auto kStream = reinterpret_cast<void*>(0x70);

struct Example {
  FakeDriver driver;
  fibc_cuda gpu{kStream, 0, 0, nullptr, nullptr};
  fibc_call call{};
  int first = 1;
  int second = 2;
  void* parameters[2] = {&first, &second};

  Example() {
    driver.install();
    driver.make_current(0);
    call.cuda = &gpu;
  }
};

void code_is_loaded_once_per_device() {
  Example e;
  cuda::Kernel kernel({kCode, sizeof kCode, "gemm", 1024});
  CHECK(kernel.function(0) == nullptr);
  CHECK(kernel.prepare(0) == FIBC_OK && kernel.prepare(0) == FIBC_OK);
  CHECK(e.driver.gpus[0].num_loaded == 1 && e.driver.gpus[1].num_loaded == 0);
  CHECK(e.driver.num_functions_loaded == 1 && e.driver.function_names.back() == "gemm");
  e.driver.make_current(1);
  CHECK(kernel.prepare(1) == FIBC_OK);
  CHECK(e.driver.gpus[1].num_loaded == 1);
  CHECK(kernel.function(0) != kernel.function(1));
  CHECK(e.driver.function_attributes.empty());  // 1 KiB is below what must be asked for
  CHECK(kernel.prepare(-1) == FIBC_DECLINED && kernel.prepare(cuda::kMaxDevices) == FIBC_DECLINED);
}

void much_shared_memory_and_large_clusters_are_asked_for() {
  Example e;
  cuda::Kernel plain({kCode, sizeof kCode, "f", 48 * 1024});
  CHECK(plain.prepare(0) == FIBC_OK && e.driver.function_attributes.empty());
  cuda::Kernel large({kCode, sizeof kCode, "f", 48 * 1024 + 1, true});
  CHECK(large.prepare(0) == FIBC_OK);
  CHECK((e.driver.function_attributes == std::vector<std::pair<int, int>>{{8, 48 * 1024 + 1}, {14, 1}}));
}

void code_that_does_not_load_is_declined_and_leaves_nothing() {
  Example e;
  cuda::Kernel missing({kCode, sizeof kCode, "missing", 0});
  CHECK(missing.prepare(0) == FIBC_DECLINED);
  CHECK(e.driver.gpus[0].num_loaded == 0 && missing.function(0) == nullptr);
  cuda::Kernel kernel({kCode, sizeof kCode, "f", 0});
  e.driver.load_result = cuda::kNoBinaryForGpu;
  CHECK(kernel.prepare(0) == FIBC_DECLINED);
  e.driver.load_result = cuda::kIllegalAddress;
  CHECK(kernel.prepare(0) == FIBC_DEVICE_ERROR);
  cuda::set_driver(nullptr);
  CHECK(kernel.prepare(0) == FIBC_DECLINED);
  CHECK(cuda::launch(kernel, e.call, {{1, 1, 1}, 32}, e.parameters) == FIBC_DECLINED);
}

void a_launch_passes_what_it_was_given() {
  Example e;
  cuda::Kernel kernel({kCode, sizeof kCode, "f", 2048});
  CHECK(cuda::launch(kernel, e.call, {{7, 8, 9}, 128}, e.parameters) == FIBC_OK);
  const fibc_tests::RecordedLaunch& plain = e.driver.launches.back();
  CHECK(plain.config.grid_x == 7 && plain.config.grid_y == 8 && plain.config.grid_z == 9);
  CHECK(plain.config.block_x == 128 && plain.config.block_y == 1 && plain.config.block_z == 1);
  CHECK(plain.config.shared_bytes == 2048 && plain.config.stream == kStream);
  CHECK(plain.attributes.empty() && plain.function == kernel.function(0));
  CHECK(plain.parameters[0] == &e.first && plain.parameters[1] == &e.second);

  cuda::Launch wide{{8, 1, 1}, 384, {2, 1, 1}, true};
  CHECK(cuda::launch(kernel, e.call, wide, e.parameters) == FIBC_OK);
  const auto& attributes = e.driver.launches.back().attributes;
  CHECK(attributes.size() == 2);
  CHECK(attributes[0].id == 4 && attributes[0].value.cluster.x == 2 && attributes[0].value.cluster.y == 1);
  CHECK(attributes[1].id == 6 && attributes[1].value.programmatic_stream_serialization == 1);

  wide.cluster[0] = 1;
  CHECK(cuda::launch(kernel, e.call, wide, e.parameters) == FIBC_OK);
  CHECK(e.driver.launches.back().attributes.size() == 1 && e.driver.launches.back().attributes[0].id == 6);
}

void a_captured_launch_of_code_that_is_not_loaded_is_declined() {
  Example e;
  cuda::Kernel kernel({kCode, sizeof kCode, "f", 0});
  e.gpu.capturing = 1;
  CHECK(cuda::launch(kernel, e.call, {{1, 1, 1}, 32}, e.parameters) == FIBC_DECLINED);
  CHECK(e.driver.gpus[0].num_loaded == 0 && e.driver.launches.empty());
  CHECK(kernel.prepare(0) == FIBC_OK);
  CHECK(cuda::launch(kernel, e.call, {{1, 1, 1}, 32}, e.parameters) == FIBC_OK);
  CHECK(e.driver.launches.size() == 1);
}

void refusals_and_errors_of_the_device_are_told_apart() {
  Example e;
  cuda::Kernel kernel({kCode, sizeof kCode, "f", 0});
  const auto status = [&](cuda::Result result) {
    e.driver.launch_result = result;
    return cuda::launch(kernel, e.call, {{1, 1, 1}, 32}, e.parameters);
  };
  for (const int refused : {1, 2, 201, 400, 701, 720, 801, 900, 906, 908, 912}) CHECK(status(refused) == FIBC_DECLINED);
  for (const int error : {4, 214, 220, 600, 700, 702, 710, 714, 715, 716, 717, 718, 719, 899, 909, 999, 12345}) {
    CHECK(status(error) == FIBC_DEVICE_ERROR);
  }
  CHECK(status(0) == FIBC_OK);
  fibc_call without{};
  CHECK(cuda::launch(kernel, without, {{1, 1, 1}, 32}, e.parameters) == FIBC_DECLINED);
}

}  // namespace

int main() {
  code_is_loaded_once_per_device();
  much_shared_memory_and_large_clusters_are_asked_for();
  code_that_does_not_load_is_declined_and_leaves_nothing();
  a_launch_passes_what_it_was_given();
  a_captured_launch_of_code_that_is_not_loaded_is_declined();
  refusals_and_errors_of_the_device_are_told_apart();
  return fibc_tests::failures != 0;
}
