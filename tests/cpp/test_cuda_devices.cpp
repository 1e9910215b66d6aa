// What a module knows of GPUs: loaded once each, held to the silicon, contexts left as found, the breaker.
#include "check.h"
#include "fake_driver.h"
#include "fibc/cuda/runtime/devices.h"
#include "fibc/cuda/launch.h"

using namespace fibc;
using fibc_tests::FakeDriver;

namespace {

constexpr CudaValidity kValidity = {"sm_90a", 90, 132, 60 << 20, std::int64_t{139} << 30};
constexpr unsigned char kCode[16] = {1};

int num_prepared[2];
std::int32_t status_of_second = FIBC_OK;

const Variant kVariants[] = {
    {"first", "sm_90a", nullptr, {}, {}, 0, nullptr,
     [](std::int32_t device) {
       ++num_prepared[device];
       return std::int32_t{FIBC_OK};
     }},
    {"second", "sm_90a", nullptr, {}, {}, 0, nullptr, [](std::int32_t) { return status_of_second; }},
};

struct Example {
  FakeDriver driver;
  cuda::Devices devices;

  Example() {
    num_prepared[0] = num_prepared[1] = 0;
    status_of_second = FIBC_OK;
    driver.install();
  }
  Reason prepare(std::int32_t index, bool accept_gpu = false) {
    return devices.prepare(driver.table(), index, &kValidity, accept_gpu, kVariants);
  }
};

void every_gpu_is_prepared_once() {
  Example e;
  CHECK(e.devices.state(0) == Reason::kUnprepared);
  CHECK(e.prepare(0) == Reason::kHit && e.prepare(0) == Reason::kHit);
  CHECK(e.devices.state(0) == Reason::kHit && e.devices.state(1) == Reason::kUnprepared);
  CHECK(num_prepared[0] == 1 && num_prepared[1] == 0 && e.driver.gpus[0].num_retained == 1);
  CHECK(e.prepare(1) == Reason::kHit && num_prepared[1] == 1);
  CHECK(e.driver.stack.empty());          // contexts were pushed for the length of a load
  CHECK(e.driver.capture_mode == 0);      // and the thread's capture mode was given back
  CHECK(e.devices[1].silicon.num_sms == 132 && e.devices[1].context == e.driver.context(1));
  CHECK(e.prepare(2) == Reason::kLoad && e.devices[2].error == cuda::kInvalidDevice);
  CHECK(e.devices.state(-1) == Reason::kDevice && e.devices.state(64) == Reason::kDevice);
}

void other_silicon_is_told_from_another_arch() {
  Example e;
  e.driver.gpus[0].silicon.compute_capability = 100;
  e.driver.gpus[1].silicon.num_sms = 16;  // a MIG slice
  CHECK(e.prepare(0) == Reason::kArch && e.prepare(1) == Reason::kSilicon);
  CHECK(num_prepared[0] == 0 && e.driver.gpus[0].num_retained == 0);  // not even a context
  CHECK(e.prepare(0, true) == Reason::kArch && e.prepare(1, true) == Reason::kSilicon);  // settled
  Example accepting;
  accepting.driver.gpus[1].silicon.num_sms = 16;
  CHECK(accepting.prepare(1, true) == Reason::kHit);
}

void silicon_can_be_foreseen_without_a_context() {
  Example e;
  e.driver.gpus[1].silicon.l2_bytes = 50 << 20;
  CHECK(cuda::Devices::foresee(e.driver.table(), 0, kValidity, false) == Reason::kHit);
  CHECK(cuda::Devices::foresee(e.driver.table(), 1, kValidity, false) == Reason::kSilicon);
  CHECK(cuda::Devices::foresee(e.driver.table(), 1, kValidity, true) == Reason::kHit);
  CHECK(cuda::Devices::foresee(e.driver.table(), 7, kValidity, true) == Reason::kLoad);
  CHECK(e.driver.gpus[0].num_retained == 0 && e.devices.state(0) == Reason::kUnprepared);
}

void a_variant_that_does_not_load_leaves_the_others_serving() {
  Example e;
  status_of_second = FIBC_DECLINED;
  CHECK(e.prepare(0) == Reason::kHit && e.devices[0].variant == -1);
  CHECK(!e.devices.has_declined(0, 0) && e.devices.has_declined(0, 1) && !e.devices.has_declined(0, cuda::kMaxDeclined));
  status_of_second = FIBC_OK;
  CHECK(e.prepare(0) == Reason::kHit && e.devices.has_declined(0, 1));  // settled
  CHECK(e.prepare(1) == Reason::kHit && !e.devices.has_declined(1, 1));
}

void a_gpu_on_which_no_variant_loads_is_settled() {
  Example e;
  status_of_second = FIBC_DECLINED;
  const Variant only[] = {kVariants[1]};
  CHECK(e.devices.prepare(e.driver.table(), 0, &kValidity, false, only) == Reason::kLoad && e.devices[0].variant == 0);
  status_of_second = FIBC_OK;
  CHECK(e.prepare(0) == Reason::kLoad);
  status_of_second = FIBC_DEVICE_ERROR;
  CHECK(e.prepare(1) == Reason::kBroken && e.devices[1].variant == 1);
}

void the_breaker_opens_for_good_on_one_gpu() {
  Example e;
  CHECK(e.prepare(0) == Reason::kHit && e.prepare(1) == Reason::kHit);
  e.driver.query_result = cuda::kIllegalAddress;
  e.devices.break_off(e.driver.table(), 0, 1, nullptr);
  CHECK(e.devices.state(0) == Reason::kBroken && e.devices.state(1) == Reason::kHit);
  CHECK(e.devices[0].variant == 1 && e.devices[0].error == cuda::kIllegalAddress);
  CHECK(e.prepare(0) == Reason::kBroken && num_prepared[0] == 1);
}

void a_context_is_pushed_only_where_another_gpu_or_none_is_current() {
  FakeDriver driver;
  const cuda::Context primary = driver.context(0);
  driver.make_current(0);
  {
    cuda::CurrentContext current(driver.table());
    CHECK(current.enter(primary, 0) && driver.stack.size() == 1);
  }
  driver.make_current(1);
  {
    cuda::CurrentContext current(driver.table());
    CHECK(current.enter(primary, 0) && driver.current() == primary && driver.stack.size() == 2);
  }
  CHECK(driver.stack.size() == 1 && driver.current() == driver.context(1));
  driver.stack.clear();
  {
    cuda::CurrentContext current(driver.table());
    CHECK(current.enter(primary, 0) && driver.current() == primary);
  }
  CHECK(driver.stack.empty());
  driver.stack.assign(1, FakeDriver::foreign_context(0));
  {
    cuda::CurrentContext current(driver.table());
    CHECK(!current.enter(primary, 0) && driver.current() == FakeDriver::foreign_context(0));
  }
  CHECK(driver.stack.size() == 1);
}

void a_foreign_context_leaves_the_gpu_unprepared() {
  Example e;
  e.driver.stack.assign(1, FakeDriver::foreign_context(0));
  CHECK(e.prepare(0) == Reason::kContext && e.devices.state(0) == Reason::kUnprepared);
  e.driver.make_current(0);
  CHECK(e.prepare(0) == Reason::kHit && e.driver.gpus[0].num_retained == 1);
}

// From the driver's answer to the breaker, as a module goes.
void an_error_of_a_launch_reaches_the_breaker() {
  Example e;
  static cuda::Kernel kernel({kCode, sizeof kCode, "f", 0});
  const Variant variants[] = {{"v", "sm_90a", nullptr, {}, {}, 0, nullptr, [](std::int32_t d) { return kernel.prepare(d); }}};
  CHECK(e.devices.prepare(e.driver.table(), 0, &kValidity, false, variants) == Reason::kHit);
  const fibc_cuda gpu{nullptr, 0, 0, nullptr, nullptr};
  fibc_call call{};
  call.cuda = &gpu;
  void* parameters[2] = {};
  CHECK(cuda::launch(kernel, call, {{1, 1, 1}, 32}, parameters) == FIBC_OK);
  e.driver.launch_result = cuda::kIllegalAddress;
  CHECK(cuda::launch(kernel, call, {{1, 1, 1}, 32}, parameters) == FIBC_DEVICE_ERROR);
  e.driver.query_result = cuda::kIllegalAddress;
  e.devices.break_off(e.driver.table(), 0, 0, gpu.stream);
  CHECK(e.devices.state(0) == Reason::kBroken);
}

}  // namespace

int main() {
  every_gpu_is_prepared_once();
  other_silicon_is_told_from_another_arch();
  silicon_can_be_foreseen_without_a_context();
  a_variant_that_does_not_load_leaves_the_others_serving();
  a_gpu_on_which_no_variant_loads_is_settled();
  the_breaker_opens_for_good_on_one_gpu();
  a_context_is_pushed_only_where_another_gpu_or_none_is_current();
  a_foreign_context_leaves_the_gpu_unprepared();
  an_error_of_a_launch_reaches_the_breaker();
  return fibc_tests::failures != 0;
}
