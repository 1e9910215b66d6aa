// Scratch memory that a kernel needs for the length of a call.
#ifndef FIBC_SIMD_WORKSPACE_H
#define FIBC_SIMD_WORKSPACE_H

#include <stdint.h>
#include <stdlib.h>

namespace fibc {
namespace {

// Keeps the last block for the next call, because malloc gives a large one back to the kernel on every free, and its
// pages then fault in again. One slot a kernel: a second concurrent call allocates for itself.
constexpr size_t kKeptBytes = size_t{8} << 20;

struct Block {
  size_t bytes;
};
constexpr size_t kHeaderBytes = 64;

inline Block*& workspace_slot() {
  static Block* slot = nullptr;
  return slot;
}

class Workspace {
 public:
  explicit Workspace(size_t bytes) {
    const size_t rounded = (bytes + kHeaderBytes + 63) / 64 * 64;
    block_ = __atomic_exchange_n(&workspace_slot(), nullptr, __ATOMIC_ACQUIRE);
    if (block_ != nullptr && block_->bytes < rounded) {
      free(block_);
      block_ = nullptr;
    }
    if (block_ == nullptr) {
      block_ = static_cast<Block*>(aligned_alloc(64, rounded));
      if (block_ != nullptr) block_->bytes = rounded;
    }
  }
  ~Workspace() {
    Block* gone = block_;
    if (gone != nullptr && gone->bytes <= kKeptBytes) {
      gone = __atomic_exchange_n(&workspace_slot(), gone, __ATOMIC_RELEASE);
    }
    free(gone);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // 64-byte aligned; null where there is no memory.
  template <class T>
  T* get() const {
    return block_ == nullptr ? nullptr : reinterpret_cast<T*>(reinterpret_cast<char*>(block_) + kHeaderBytes);
  }

 private:
  Block* block_;
};

}  // namespace
}  // namespace fibc

#endif
