// The silicon of a GPU, or of a slice of one, as the driver describes it; held to the one the rows were measured on.
#ifndef FIBC_SILICON_H
#define FIBC_SILICON_H

#include <cstdint>

#include "fibc/reason.h"
#include "fibc/table.h"

namespace fibc {

struct Silicon {
  std::int32_t compute_capability = 0;  // 10 * major + minor
  std::int32_t num_sms = 0;
  std::int64_t l2_bytes = 0;
  std::int64_t memory_bytes = 0;
};

// Drivers keep different amounts for themselves; products and slices differ by more than this part.
inline constexpr std::int64_t kMemoryTolerance = 32;

[[nodiscard]] constexpr bool has_like_memory(std::int64_t recorded_bytes, std::int64_t here_bytes) noexcept {
  const std::int64_t apart = recorded_bytes < here_bytes ? here_bytes - recorded_bytes : recorded_bytes - here_bytes;
  return apart <= recorded_bytes / kMemoryTolerance;
}

// `accept_gpu`: other silicon of the same compute capability will do.
[[nodiscard]] constexpr Reason check_silicon(const CudaValidity& validity, const Silicon& here, bool accept_gpu) noexcept {
  if (here.compute_capability != validity.compute_capability) return Reason::kArch;
  if (accept_gpu) return Reason::kHit;
  const bool alike = here.num_sms == validity.num_sms && here.l2_bytes == validity.l2_bytes &&
                     has_like_memory(validity.memory_bytes, here.memory_bytes);
  return alike ? Reason::kHit : Reason::kSilicon;
}

}  // namespace fibc

#endif
