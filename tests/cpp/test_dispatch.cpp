// What a call comes to: the order of reasons, hosts, binding of axes, counters.
#include "check.h"
#include "fibc/dispatch.h"
#include "fibc/stats.h"

using namespace fibc;

namespace {

constexpr const char* kLevels[] = {"avx2", "avx512"};
constexpr CpuValidity kValidity = {"A CPU", kLevels, 2048, 4096, 2};

Host host_like(const CpuValidity& validity) {
  Host host;
  host.isa.avx2 = host.isa.avx512 = true;
  std::strncpy(host.model.text, validity.model, sizeof host.model.text - 1);
  host.l2_bytes = validity.l2_bytes;
  host.l3_bytes = validity.l3_bytes;
  return host;
}

void a_host_is_held_to_the_validity() {
  Host host = host_like(kValidity);
  CHECK(check_host(kValidity, host, false) == Reason::kHit);
  host.l3_bytes = 1;
  CHECK(check_host(kValidity, host, false) == Reason::kCaches);
  host.model.text[0] = 'B';
  CHECK(check_host(kValidity, host, false) == Reason::kCpuModel);
  CHECK(check_host(kValidity, host, true) == Reason::kHit);
  host.isa.avx512 = false;
  CHECK(check_host(kValidity, host, false) == Reason::kIsa);
  CHECK(check_host(kValidity, host, true) == Reason::kIsa);
}

void levels_include_those_before_them() {
  const Isa here = detect_isa();
  CHECK(here.avx2 || !here.avx512);
  CHECK(here.avx512 || !here.avx512_bf16);
  CHECK(here.avx512_bf16 || !here.amx_bf16);
  CHECK(!here.has("avx10") && !here.has(""));
  CHECK(Host::detect().model.text[48] == '\0');
}

constexpr Axis kAxes[] = {{"M", kVaries}, {"K", 4}};
constexpr std::int32_t kMk[] = {0, 1};
constexpr std::int32_t kM[] = {0};
constexpr Argument kInputs[] = {{"A", Kind::kTensor, dtype_of("float32"), kMk, false, kNoAlias},
                                {"x", Kind::kTensor, dtype_of("float32"), kM, false, kNoAlias}};
constexpr Argument kOutputs[] = {{"y", Kind::kTensor, dtype_of("float32"), kM, false, kNoAlias}};
constexpr Feature kFeatures[] = {{0, -1}};
constexpr Bound kBounds[] = {{1, 8}};
constexpr Region kRegions[] = {{kBounds, 0, false}};
constexpr TensorGuard kGuards[] = {{Layout::kContiguous, 4}, {Layout::kContiguous, 4}};
std::int32_t returns_seven(const fibc_call* call) { return call->num_threads == 3 ? 7 : 0; }
const Variant kVariants[] = {{"v", "avx2", returns_seven, kGuards, kGuards, INT64_MAX}};
const Table kTable = {"",        {"f", kAxes, kInputs, kOutputs}, kFeatures, kRegions, kVariants, Target::kCpu,
                      kValidity, {},                              ""};

struct Example {
  float memory[64];
  std::int64_t a_shape[2] = {3, 4};
  std::int64_t a_strides[2] = {4, 1};
  std::int64_t x_shape[1] = {3};
  std::int64_t x_strides[1] = {1};
  Call call;

  Choice chosen() {
    call.inputs[0] = {memory, a_shape, a_strides};
    call.inputs[1] = {memory + 32, x_shape, x_strides};
    Isa isa;
    isa.avx2 = true;
    return choose(kTable, isa, call);
  }

  Example() {
    call.input_facts[0] = {dtype_of("float32"), 2, {kCpuDevice, 0}};
    call.input_facts[1] = {dtype_of("float32"), 1, {kCpuDevice, 0}};
    call.num_threads = 3;
  }
};

void a_call_goes_where_its_sizes_say() {
  Example good;
  const Choice choice = good.chosen();
  CHECK(choice.reason == Reason::kHit && choice.region == 0);
  CHECK(good.call.axes[0] == 3 && good.call.axes[1] == 4);
  CHECK(launch(returns_seven, good.call, nullptr) == 7);

  Example device;
  device.call.input_facts[0].place = {kCudaDevice, 0};
  CHECK(device.chosen().reason == Reason::kDevice);
  Example dtype;
  dtype.call.input_facts[1].dtype = dtype_of("float16");
  CHECK(dtype.chosen().reason == Reason::kDType);
  Example rank;
  rank.call.input_facts[1].rank = 2;
  CHECK(rank.chosen().reason == Reason::kRank);
  Example constant;
  constant.a_shape[1] = 5;
  CHECK(constant.chosen().reason == Reason::kShape);
  Example varying;
  varying.x_shape[0] = 2;
  CHECK(varying.chosen().reason == Reason::kShape);
  Example beyond;
  beyond.a_shape[0] = beyond.x_shape[0] = 9;
  CHECK(beyond.chosen().reason == Reason::kRegion && beyond.chosen().region == kNoRegion);
  Example empty;
  empty.a_shape[0] = empty.x_shape[0] = 0;
  CHECK(empty.chosen().reason == Reason::kEmpty);
}

void counters_count() {
  Stats stats(2);
  stats.count_hit(1);
  stats.count_hit(1);
  stats.count(Reason::kGrad);
  CHECK(stats.hits(0) == 0 && stats.hits(1) == 2);
  CHECK(stats.others(Reason::kGrad) == 1 && stats.others(Reason::kHit) == 0);
}

}  // namespace

int main() {
  a_host_is_held_to_the_validity();
  levels_include_those_before_them();
  a_call_goes_where_its_sizes_say();
  counters_count();
  return fibc_tests::failures != 0;
}
