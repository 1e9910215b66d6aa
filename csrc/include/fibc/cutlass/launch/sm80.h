// A launch of a CUTLASS 2.x GEMM for sm_80 to sm_89. Parameters are built for each call, which takes well under 100 ns.
#ifndef FIBC_CUTLASS_LAUNCH_SM80_H
#define FIBC_CUTLASS_LAUNCH_SM80_H

#include <stdint.h>

#include "fibc/cuda/launch.h"
#include "fibc/cutlass/launch/gemm.h"

namespace fibc {
namespace sm80 {
namespace {

// Config has Kernel (a cutlass::gemm::kernel::GemmUniversal) and Element.
template <class Config>
class Launcher {
  using Kernel = typename Config::Kernel;
  using Element = typename Config::Element;

 public:
  [[nodiscard]] static int32_t run(cuda::Kernel& code, const fibc_call& call, cutlass_launch::Positions at) noexcept {
    const cutlass_launch::Gemm gemm = cutlass_launch::gemm_of(call, at);
    if (gemm.m == 0 || gemm.n == 0) return FIBC_OK;
    if (call.cuda == nullptr || !cutlass_launch::fits(gemm, sizeof(Element))) return FIBC_DECLINED;
    const cutlass::gemm::GemmCoord problem(static_cast<int>(gemm.m), static_cast<int>(gemm.n), static_cast<int>(gemm.k));
    if (Kernel::can_implement(problem) != cutlass::Status::kSuccess) return FIBC_DECLINED;
    const typename Kernel::Arguments arguments(cutlass::gemm::GemmUniversalMode::kGemm, problem, /*batch_count=*/1,
                                               {1.0f, 0.0f}, gemm.a, gemm.b, nullptr, gemm.c, 0, 0, 0, 0,
                                               gemm.a_stride, gemm.b_stride, gemm.c_stride, gemm.c_stride);
    typename Kernel::Params params(arguments, /*device_sms=*/0, /*sm_occupancy=*/0);
    const dim3 grid = params.get_grid_dims();
    constexpr unsigned kMostYz = 65535;
    if (grid.y > kMostYz || grid.z > kMostYz) return FIBC_DECLINED;
    void* parameters[] = {&params};
    return cuda::launch(code, call, {{grid.x, grid.y, grid.z}, Kernel::kThreadCount}, parameters);
  }

  [[nodiscard]] static int64_t workspace(const fibc_call&, cutlass_launch::Positions) noexcept { return 0; }

  [[nodiscard]] static int32_t prepare(cuda::Kernel& code, int32_t device) noexcept { return code.prepare(device); }
};

}  // namespace
}  // namespace sm80
}  // namespace fibc

#endif
