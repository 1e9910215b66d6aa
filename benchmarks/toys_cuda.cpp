// Launchers of toys.cu, as a backend would generate them; toys_image.h holds its compiled bytes as TOYS_IMAGE.
#include <cstdint>

#include "fibc/cuda/launch.h"
#include "toys_image.h"

using fibc::cuda::Kernel;
using fibc::cuda::Launch;

namespace {

alignas(16) constexpr unsigned char kImage[] = {TOYS_IMAGE};

constexpr std::uint32_t kThreads = 128;
constexpr std::int32_t kPlainBytes = kThreads * 4;
constexpr std::int32_t kManyBytes = 100 * 1024;  // more than a kernel gets without asking
constexpr std::uint32_t kSplits = 4;

Kernel rows_f32({kImage, sizeof kImage, "toy_rows_f32", kPlainBytes});
Kernel rows_bf16({kImage, sizeof kImage, "toy_rows_bf16", kPlainBytes});
Kernel cluster({kImage, sizeof kImage, "toy_cluster", kManyBytes});
Kernel split({kImage, sizeof kImage, "toy_split", kPlainBytes});
Kernel fault({kImage, sizeof kImage, "toy_fault", 0});
Kernel nothing({kImage, sizeof kImage, "toy_nothing", 0});

std::uint32_t rows_of(const fibc_call& call) { return static_cast<std::uint32_t>(call.axes[0]); }

// x[M, H], y[M]: the parameters that most kernels take.
struct Parameters {
  void* x;
  void* y;
  long long row_stride;
  int h;
  float mark;
  void* counters;
  void* scratch;
  void* list[7] = {&x, &y, &row_stride, &h, &mark, &counters, &scratch};

  Parameters(const fibc_call& call, float marked)
      : x(call.inputs[0].data),
        y(call.outputs[0].data),
        row_stride(call.inputs[0].strides[0]),
        h(static_cast<int>(call.axes[1])),
        mark(marked),
        counters(call.cuda->counters),
        scratch(call.cuda->scratch) {}
};

std::int32_t run(Kernel& kernel, const fibc_call& call, const Launch& launch, float mark) {
  Parameters parameters(call, mark);
  return fibc::cuda::launch(kernel, call, launch, parameters.list);
}

}  // namespace

#define FIBC_EXPORT extern "C" __attribute__((visibility("default")))

#define TOY(name, kernel, launched, workspace_bytes)                                                             \
  FIBC_EXPORT std::int32_t name(const fibc_call* call) { return launched; }                                      \
  FIBC_EXPORT std::int64_t name##_workspace([[maybe_unused]] const fibc_call* call) { return workspace_bytes; }  \
  FIBC_EXPORT std::int32_t name##_prepare(std::int32_t device) { return kernel.prepare(device); }

TOY(fibc_toy_rows, rows_f32, run(rows_f32, *call, {{rows_of(*call), 1, 1}, kThreads}, 1), 0)
TOY(fibc_toy_rows_bf16, rows_bf16, run(rows_bf16, *call, {{rows_of(*call), 1, 1}, kThreads}, 1), 0)
TOY(fibc_toy_split, split, run(split, *call, {{rows_of(*call), kSplits, 1}, kThreads}, 2),
    call->axes[0] * kSplits * 4)
TOY(fibc_toy_cluster, cluster, run(cluster, *call, {{rows_of(*call), 1, 1}, kThreads, {2, 1, 1}, true}, 3), 0)
TOY(fibc_toy_refuses, rows_f32, (static_cast<void>(call), FIBC_DECLINED), 0)
TOY(fibc_toy_idle, nothing, run(nothing, *call, {{1, 1, 1}, 32}, 0), 0)

FIBC_EXPORT std::int32_t fibc_toy_fault(const fibc_call* call) {
  void* nowhere = reinterpret_cast<void*>(16);
  void* list[] = {&nowhere};
  return fibc::cuda::launch(fault, *call, {{1, 1, 1}, 1}, list);
}
FIBC_EXPORT std::int64_t fibc_toy_fault_workspace(const fibc_call*) { return 0; }
FIBC_EXPORT std::int32_t fibc_toy_fault_prepare(std::int32_t device) { return fault.prepare(device); }
