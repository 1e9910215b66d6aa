// How a kernel shares its work among threads.
#ifndef FIBC_SIMD_WORK_H
#define FIBC_SIMD_WORK_H

#include <stdint.h>

#include "fibc/kernel_abi.h"

namespace fibc {
namespace {

struct Range {
  int64_t begin;
  int64_t end;
};

// The share of `thread` in `count` items: contiguous, equal to within one item, empty where there are more threads.
inline Range share(int64_t count, int32_t thread, int32_t num_threads) {
  const int64_t each = count / num_threads;
  const int64_t rest = count % num_threads;
  const int64_t begin = thread * each + (thread < rest ? thread : rest);
  return {begin, begin + each + (thread < rest ? 1 : 0)};
}

// Runs body(thread, num_threads) on at most `wanted` threads. Shares may run one after another: bodies never wait.
template <class Body>
inline void run_parallel(const fibc_call* call, int64_t wanted, const Body& body) {
  const int64_t most = wanted < 1 ? 1 : wanted;
  const int32_t num_threads = call->num_threads < most ? call->num_threads : static_cast<int32_t>(most);
  if (num_threads <= 1) {
    body(0, 1);
    return;
  }
  const auto task = [](void* context, int32_t thread, int32_t count) {
    (*static_cast<const Body*>(context))(thread, count);
  };
  call->parallel(task, const_cast<void*>(static_cast<const void*>(&body)), num_threads);
}

}  // namespace
}  // namespace fibc

#endif
