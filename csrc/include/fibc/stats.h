// Counters of what happened to calls; exact under threads, ordered with nothing else.
#ifndef FIBC_STATS_H
#define FIBC_STATS_H

#include <atomic>
#include <cstdint>
#include <memory>

#include "fibc/reason.h"

namespace fibc {

class Stats {
 public:
  explicit Stats(std::int32_t num_variants) : hits_(new std::atomic<std::int64_t>[static_cast<std::size_t>(num_variants)]{}) {}

  void count_hit(std::int32_t variant) noexcept { add(hits_[static_cast<std::size_t>(variant)]); }
  void count(Reason reason) noexcept { add(others_[static_cast<int>(reason)]); }

  [[nodiscard]] std::int64_t hits(std::int32_t variant) const noexcept {
    return hits_[static_cast<std::size_t>(variant)].load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::int64_t others(Reason reason) const noexcept {
    return others_[static_cast<int>(reason)].load(std::memory_order_relaxed);
  }

 private:
  static void add(std::atomic<std::int64_t>& counter) noexcept { counter.fetch_add(1, std::memory_order_relaxed); }

  std::unique_ptr<std::atomic<std::int64_t>[]> hits_;  // calls that a variant served
  std::atomic<std::int64_t> others_[kNumReasons] = {};
};

}  // namespace fibc

#endif
