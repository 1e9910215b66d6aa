// Functions of libraries that the process has already loaded, found by name; nothing is ever loaded.
#ifndef FIBC_LOADED_LIBRARY_H
#define FIBC_LOADED_LIBRARY_H

#include <dlfcn.h>

namespace fibc {

// `path` names a loaded library: symbols are searched in it and in what it depends on, so they come from the same
// libraries that it calls itself. The handle stays open; torch is never unloaded.
class LoadedLibrary {
 public:
  LoadedLibrary() noexcept = default;
  explicit LoadedLibrary(const char* path) noexcept : handle_(dlopen(path, RTLD_LAZY | RTLD_NOLOAD)) {}

  // False, and `function` null, where no library exports `name`.
  template <typename Function>
  bool find(Function*& function, const char* name) const noexcept {
    function = handle_ == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(handle_, name));
    return function != nullptr;
  }

 private:
  void* handle_ = nullptr;
};

}  // namespace fibc

#endif
