// A launch of a CUTLASS 3.x GEMM for sm_90a.
//
// Parameters are built for each call: that takes about 40 ns, where tensor maps come from the cache.
#ifndef FIBC_CUTLASS_LAUNCH_SM90_H
#define FIBC_CUTLASS_LAUNCH_SM90_H

#include <stdint.h>

#include <type_traits>

#include "fibc/cuda/launch.h"
#include "fibc/cutlass/launch/gemm.h"
#include "fibc/cutlass/launch/multiprocessors.h"
#include "fibc/cutlass/launch/tensor_maps.h"
#include "fibc/cutlass/split_k.h"

namespace fibc {
namespace sm90 {
namespace {

// The order in which tiles are taken, and what else CUTLASS decides when it launches.
enum class Raster { kHeuristic, kAlongM, kAlongN };

struct Choice {
  bool swapped;    // the kernel computes C^T = B A^T
  bool dependent;  // programmatic dependent launch
  int splits;      // of the sum over K; 0 leaves it to stream-K
  int swizzle;
  Raster raster;
};

// Config has Kernel (a cutlass::gemm::kernel::GemmUniversal), Element and kChoice.
template <class Config>
class Launcher {
  using Kernel = typename Config::Kernel;
  using Element = typename Config::Element;
  using Scheduler = typename Kernel::TileScheduler;
  static constexpr Choice kChoice = Config::kChoice;
  static constexpr bool kDivided = std::is_same_v<typename Kernel::TileSchedulerTag, SplitK>;
  static constexpr int kTileM = cute::size<0>(typename Kernel::TileShape{});
  static constexpr int kTileN = cute::size<1>(typename Kernel::TileShape{});
  static constexpr int kClusterM = cute::size<0>(typename Kernel::ClusterShape{});
  static constexpr int kClusterN = cute::size<1>(typename Kernel::ClusterShape{});

  // Counters are one for each of the two warp groups of a tile.
  static constexpr int64_t kMostTiles = FIBC_COUNTER_BYTES / (2 * sizeof(int32_t));

  // Stream-K divides the tiles of at most two waves of blocks; no GPU of this architecture has more multiprocessors.
  static constexpr int kMostMultiprocessors = 144;

 public:
  [[nodiscard]] static int32_t run(cuda::Kernel& code, const fibc_call& call, cutlass_launch::Positions at) noexcept {
    const cutlass_launch::Gemm gemm = cutlass_launch::gemm_of(call, at);
    if (gemm.m == 0 || gemm.n == 0) return FIBC_OK;
    if (call.cuda == nullptr || !cutlass_launch::fits(gemm, sizeof(Element))) return FIBC_DECLINED;
    const int num_sms = cutlass_launch::num_multiprocessors(call.cuda->device);
    if (num_sms <= 0) return FIBC_DECLINED;
    if constexpr (kDivided) {
      if (call.cuda->counters == nullptr || call.cuda->scratch == nullptr) return FIBC_DECLINED;
      if (num_tiles(gemm) > kMostTiles || num_sms > kMostMultiprocessors) return FIBC_DECLINED;
    }
    typename Kernel::Arguments arguments = arguments_of(gemm);
    arguments.hw_info = {0, num_sms};
    set_scheduler(arguments.scheduler, call);
    if (!Kernel::can_implement(arguments)) return FIBC_DECLINED;
    cutlass_maps::refused = false;
    typename Kernel::Params params =
        Kernel::to_underlying_arguments(arguments, kDivided ? call.cuda->scratch : nullptr);
    if (cutlass_maps::refused) return FIBC_DECLINED;
    const dim3 grid = Kernel::get_grid_shape(params);
    void* parameters[] = {&params};
    const cuda::Launch launch{{grid.x, grid.y, grid.z},
                              Kernel::MaxThreadsPerBlock,
                              {kClusterM, kClusterN, 1},
                              kChoice.dependent};
    return cuda::launch(code, call, launch, parameters);
  }

  [[nodiscard]] static int64_t workspace(const fibc_call& call, cutlass_launch::Positions at) noexcept {
    if constexpr (!kDivided) return 0;
    const int64_t tiles = num_tiles(cutlass_launch::gemm_of(call, at));
    constexpr int64_t kMostDivided = 2 * kMostMultiprocessors;
    const int64_t places = kChoice.splits > 1 ? tiles * (kChoice.splits - 1) : tiles < kMostDivided ? tiles : kMostDivided;
    return places * kTileM * kTileN * static_cast<int64_t>(sizeof(float)) + 1;  // at least 1: it needs counters
  }

  [[nodiscard]] static int32_t prepare(cuda::Kernel& code, int32_t device) noexcept {
    const int32_t status = code.prepare(device);
    return status == FIBC_OK && cutlass_launch::num_multiprocessors(device) == 0 ? FIBC_DECLINED : status;
  }

 private:
  [[nodiscard]] static int64_t round_up(int64_t value, int64_t unit) noexcept { return (value + unit - 1) / unit * unit; }

  // Output tiles as the scheduler counts them: whole clusters, and whole squares of the swizzle.
  [[nodiscard]] static int64_t num_tiles(const cutlass_launch::Gemm& gemm) noexcept {
    const int64_t m = kChoice.swapped ? gemm.n : gemm.m;
    const int64_t n = kChoice.swapped ? gemm.m : gemm.n;
    return round_up((m + kTileM - 1) / kTileM, kClusterM * kChoice.swizzle) *
           round_up((n + kTileN - 1) / kTileN, kClusterN * kChoice.swizzle);
  }

  [[nodiscard]] static typename Kernel::Arguments arguments_of(const cutlass_launch::Gemm& gemm) noexcept {
    const auto element = [](void* data) { return static_cast<Element*>(data); };
    const int m = static_cast<int>(gemm.m);
    const int n = static_cast<int>(gemm.n);
    const int k = static_cast<int>(gemm.k);
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    if constexpr (kChoice.swapped) {
      arguments.problem_shape = {n, m, k, 1};
      arguments.mainloop = {element(gemm.b), {gemm.b_stride, cute::_1{}, 0}, element(gemm.a), {gemm.a_stride, cute::_1{}, 0}};
      arguments.epilogue = {{1.0f, 0.0f}, nullptr, {}, element(gemm.c), {cute::_1{}, gemm.c_stride, 0}};
    } else {
      arguments.problem_shape = {m, n, k, 1};
      arguments.mainloop = {element(gemm.a), {gemm.a_stride, cute::_1{}, 0}, element(gemm.b), {gemm.b_stride, cute::_1{}, 0}};
      arguments.epilogue = {{1.0f, 0.0f}, nullptr, {}, element(gemm.c), {gemm.c_stride, cute::_1{}, 0}};
    }
    return arguments;
  }

  template <class Arguments>
  static void set_scheduler(Arguments& arguments, const fibc_call& call) noexcept {
    using Order = std::decay_t<decltype(arguments.raster_order)>;
    arguments.max_swizzle_size = kChoice.swizzle;
    arguments.raster_order = kChoice.raster == Raster::kHeuristic ? Order::Heuristic
                             : kChoice.raster == Raster::kAlongM  ? Order::AlongM
                                                                  : Order::AlongN;
    if constexpr (kDivided) {
      using Decomposition = std::decay_t<decltype(arguments.decomposition_mode)>;
      arguments.splits = kChoice.splits > 1 ? kChoice.splits : 1;
      arguments.decomposition_mode = kChoice.splits > 1 ? Decomposition::SplitK : Decomposition::StreamK;
      arguments.counters = static_cast<int32_t*>(call.cuda->counters);
    }
  }
};

}  // namespace
}  // namespace sm90
}  // namespace fibc

#endif
