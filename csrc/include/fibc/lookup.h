// The lookup: from axes to the region that holds them.
#ifndef FIBC_LOOKUP_H
#define FIBC_LOOKUP_H

#include <cstdint>

#include "fibc/table.h"

namespace fibc {

inline constexpr std::int32_t kNoRegion = -1;

[[nodiscard]] constexpr std::int64_t feature_value(const Feature& feature, const std::int64_t* axes) noexcept {
  const std::int64_t top = axes[feature.numerator];
  if (feature.denominator < 0) return top;
  const std::int64_t bottom = axes[feature.denominator];
  if (bottom <= 0) return 0;
  return top / bottom + (top % bottom != 0 ? 1 : 0);
}

[[nodiscard]] constexpr bool holds(const Region& region, const std::int64_t* values) noexcept {
  for (std::int32_t f = 0; f < region.bounds.size; ++f) {
    if (values[f] < region.bounds[f].first || region.bounds[f].last < values[f]) return false;
  }
  return true;
}

// Returns the index of the region that holds `axes`, or kNoRegion.
[[nodiscard]] constexpr std::int32_t find_region(const Table& table, const std::int64_t* axes) noexcept {
  if (table.features.size == 0) return kNoRegion;
  std::int64_t values[kMaxFeatures] = {};
  for (std::int32_t f = 0; f < table.features.size; ++f) values[f] = feature_value(table.features[f], axes);
  // Regions are sorted by their bounds: none past the last that starts at or below the first value can hold it.
  std::int32_t begin = 0;
  std::int32_t end = table.regions.size;
  while (begin < end) {
    const std::int32_t middle = begin + (end - begin) / 2;
    if (table.regions[middle].bounds[0].first <= values[0]) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  // With one feature, disjoint regions leave a single possibility.
  const std::int32_t stop = table.features.size == 1 && begin > 0 ? begin - 1 : 0;
  for (std::int32_t r = begin - 1; r >= stop; --r) {
    if (holds(table.regions[r], values)) return r;
  }
  return kNoRegion;
}

}  // namespace fibc

#endif
