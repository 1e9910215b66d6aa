// The process's one OpenMP runtime: the one that torch has loaded, bound by name.
#ifndef FIBC_OPENMP_H
#define FIBC_OPENMP_H

#include "fibc/loaded_library.h"

namespace fibc {

// GCC's interface, which LLVM's and Intel's runtimes export as well.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned num_threads, unsigned flags) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;

  [[nodiscard]] static OpenMp find(const LoadedLibrary& library) noexcept {
    OpenMp out;
    const bool found = library.find(out.parallel, "GOMP_parallel") && library.find(out.thread_num, "omp_get_thread_num") &&
                       library.find(out.num_threads, "omp_get_num_threads");
    return found ? out : OpenMp{};
  }

  explicit operator bool() const noexcept { return parallel != nullptr; }
};

}  // namespace fibc

#endif
