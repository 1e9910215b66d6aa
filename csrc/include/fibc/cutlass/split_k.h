// A tile scheduler for sm_90a that divides the sum over K among blocks and leaves its counters zero.
//
// Split-K: every block but the last of a tile stores its sums to a place of its own and counts up; the last waits for all
// of them and adds them in a fixed order. CUTLASS's own scheduler lets the blocks of a tile add one after the other.
// Stream-K: in that turn, as CUTLASS does it, because the blocks of a tile are known to each of them only in part.
// Both orders are fixed: equal inputs give equal bits. CUTLASS needs its counters cleared before each launch; here the
// last block of a tile clears the tile's, so that a launch needs no memset.
#ifndef FIBC_CUTLASS_SPLIT_K_H
#define FIBC_CUTLASS_SPLIT_K_H

#include <stdint.h>

#include "fibc/cutlass/sm90.h"  // included by every source itself: the digest of a kernel sees those that it names

namespace fibc {
namespace sm90 {

// Tag of the scheduler, as cutlass::gemm::StreamKScheduler is one.
struct SplitK {};

template <class TileShape, class ClusterShape>
class SplitKScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamK<TileShape, ClusterShape> {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamK<TileShape, ClusterShape>;

 public:
  using WorkTileInfo = typename Base::WorkTileInfo;

  struct Arguments : Base::Arguments {
    int32_t* counters = nullptr;
  };

  struct Params : Base::Params {
    int32_t* counters = nullptr;  // one for each warp group of each tile that is divided
  };

  // Sums of a warp group of a tile that a block stores.
  static constexpr int32_t kTileElems = cute::size<0>(TileShape{}) * cute::size<1>(TileShape{});

  using Base::Base;

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape problem_shape, TileShape tile_shape, ClusterShape cluster_shape,
                                        const cutlass::KernelHardwareInfo& hardware, const Arguments& arguments,
                                        void* scratch, uint32_t epilogue_subtile = 1) {
    Params params;
    static_cast<typename Base::Params&>(params) = Base::to_underlying_arguments(
        problem_shape, tile_shape, cluster_shape, hardware, arguments, scratch, epilogue_subtile);
    params.counters = arguments.counters;
    return params;
  }

  // As CUTLASS has it, which does not compile in 4.2.
  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo work, uint32_t advance_count = 1) const {
    if (Base::continue_current_work(work)) return false;
    SplitKScheduler next = *this;
    next.advance_to_next_work(advance_count);
    return !next.get_current_work().is_valid();
  }

  // Adds up what the blocks of a tile have; the one that writes the tile then holds the sum.
  template <class Accumulators>
  CUTLASS_DEVICE static void fixup(const Params& params, const WorkTileInfo& work, Accumulators& accumulators,
                                   uint32_t num_groups, uint32_t group) {
    using namespace cutlass;
    if (!Base::requires_fixup(params, work)) return;
    constexpr uint32_t kFirstBarrier = static_cast<uint32_t>(arch::ReservedNamedBarriers::StreamkBarrier0);
    using Barrier = NamedBarrierManager<NumThreadsPerWarpGroup, kFirstBarrier, 2>;
    using Sums = Array<typename Accumulators::value_type, cute::size(Accumulators{})>;
    using Partial = BlockStripedReduce<NumThreadsPerWarpGroup, Sums>;
    static_assert(sizeof(typename Accumulators::value_type) == 4);

    const uint32_t thread = threadIdx.x % NumThreadsPerWarpGroup;
    const uint64_t tile = Base::output_tile_index(params, work);
    const int counter = static_cast<int>(tile * num_groups + group);
    Sums& mine = *reinterpret_cast<Sums*>(accumulators.data());
    const uint32_t num_splits = static_cast<uint32_t>(params.divmod_splits_.divisor);
    const uint32_t num_places = num_splits > 1 ? num_splits - 1 : 1;
    const auto place = [&](uint32_t index) {
      const uint64_t offset = (tile * num_places + index) * kTileElems +
                              static_cast<uint64_t>(group) * (kTileElems / num_groups);
      return reinterpret_cast<Sums*>(static_cast<float*>(params.reduction_workspace_) + offset);
    };
    const auto clear = [&] {
      if (thread == 0) params.counters[counter] = 0;  // nobody looks at it again in this launch
    };

    const bool writes = Base::compute_epilogue(work, params);
    if (num_splits > 1) {
      if (!writes) {
        Partial::store(place(split_of(params, work)), mine, thread);
        Barrier::arrive_inc(group, params.counters, thread, counter, 1);
        return;
      }
      Barrier::wait_eq(group, params.counters, thread, counter, static_cast<int>(num_splits - 1));
      clear();
      for (uint32_t index = 0; index + 1 < num_splits; ++index) Partial::load_add(mine, place(index), thread);
      return;
    }
    if (work.K_idx != 0) Barrier::wait_eq(group, params.counters, thread, counter, work.K_idx);
    if (writes) {
      clear();
      Partial::load_add(mine, place(0), thread);
      return;
    }
    if (work.K_idx == 0) {
      Partial::store(place(0), mine, thread);
    } else {
      Partial::reduce(place(0), mine, thread);
    }
    Barrier::arrive_inc(group, params.counters, thread, counter, static_cast<int>(work.k_tile_count));
  }

 private:
  // The first big_units_ splits of a tile have one step along K more than the others.
  CUTLASS_DEVICE static uint32_t split_of(const Params& params, const WorkTileInfo& work) {
    const uint32_t start = static_cast<uint32_t>(work.K_idx);
    const uint32_t length = static_cast<uint32_t>(params.divmod_k_tiles_per_sk_unit_.divisor);
    const uint32_t num_long = params.big_units_;
    const uint32_t end_of_long = num_long * (length + 1);
    return start < end_of_long ? start / (length + 1) : num_long + (start - end_of_long) / length;
  }
};

}  // namespace sm90
}  // namespace fibc

template <class TileShape, class ClusterShape, uint32_t num_stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<fibc::sm90::SplitK, cutlass::arch::Sm90, TileShape, ClusterShape,
                                                            num_stages> {
  using Scheduler = fibc::sm90::SplitKScheduler<TileShape, ClusterShape>;
};

#endif
