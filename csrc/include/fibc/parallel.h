// Parallel regions for kernels, run by the process's one OpenMP runtime: the one that torch has loaded.
#ifndef FIBC_PARALLEL_H
#define FIBC_PARALLEL_H

#include <pthread.h>

#include <atomic>
#include <cstdint>

#include "fibc/kernel_abi.h"
#include "fibc/openmp.h"

namespace fibc {

// State of the calling module; hidden visibility keeps one per shared object.
struct ParallelRuntime {
  OpenMp openmp;
  std::atomic<std::int32_t> num_forks{0};  // between the process that loaded the module and this one
  std::atomic<std::int64_t> num_serial{0};  // regions that ran serially because no runtime was found
};

inline ParallelRuntime& parallel_runtime() noexcept {
  static ParallelRuntime runtime;
  return runtime;
}

namespace detail {

struct Shares {
  fibc_task task;
  void* context;
  std::int32_t num_shares;
};

// The team may be smaller than asked (nested regions, OMP_THREAD_LIMIT): the threads that came take all shares.
inline void run_shares(void* data) noexcept {
  const auto& shares = *static_cast<const Shares*>(data);
  const OpenMp& openmp = parallel_runtime().openmp;
  const std::int32_t step = openmp.num_threads();
  for (std::int32_t share = openmp.thread_num(); share < shares.num_shares; share += step) {
    shares.task(shares.context, share, shares.num_shares);
  }
}

}  // namespace detail

// Once per module. After a fork the runtime's threads are gone and a region would wait for them for ever, so a child
// runs every share in its own thread.
inline void start_parallel(const OpenMp& openmp) noexcept {
  parallel_runtime().openmp = openmp;
  pthread_atfork(nullptr, nullptr, [] { parallel_runtime().num_forks.fetch_add(1, std::memory_order_relaxed); });
}

// The fibc_parallel that kernels are given.
inline void parallel(fibc_task task, void* context, std::int32_t num_threads) noexcept {
  ParallelRuntime& runtime = parallel_runtime();
  if (num_threads > 1 && runtime.num_forks.load(std::memory_order_relaxed) == 0) {
    if (runtime.openmp) {
      detail::Shares shares{task, context, num_threads};
      runtime.openmp.parallel(detail::run_shares, &shares, static_cast<unsigned>(num_threads), 0);
      return;
    }
    runtime.num_serial.fetch_add(1, std::memory_order_relaxed);
  }
  for (std::int32_t share = 0; share < num_threads; ++share) task(context, share, num_threads);
}

// Threads that a call may use when torch is set to `num_threads`.
[[nodiscard]] inline std::int32_t usable_threads(std::int32_t num_threads) noexcept {
  return parallel_runtime().num_forks.load(std::memory_order_relaxed) != 0 ? 1 : num_threads;
}

}  // namespace fibc

#endif
