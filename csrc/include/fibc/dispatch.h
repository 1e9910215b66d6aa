// The decision: which variant serves a call, or why native does. No Python, no torch, no allocation, no lock.
#ifndef FIBC_DISPATCH_H
#define FIBC_DISPATCH_H

#include <cstdint>
#include <cstring>

#include "fibc/axes.h"
#include "fibc/call.h"
#include "fibc/cpu.h"
#include "fibc/guards.h"
#include "fibc/lookup.h"
#include "fibc/reason.h"
#include "fibc/table.h"

namespace fibc {

// What is known of this machine when a module is imported.
struct Host {
  Isa isa;
  CpuModel model;
  std::int64_t l2_bytes = 0;
  std::int64_t l3_bytes = 0;

  [[nodiscard]] static Host detect() noexcept {
    return {detect_isa(), detect_model(), detect_cache_bytes(2), detect_cache_bytes(3)};
  }
};

// Holds the machine to the one the rows were measured on. `accept_cpu`: another model of the same ISA will do.
[[nodiscard]] inline Reason check_host(const CpuValidity& validity, const Host& host, bool accept_cpu) noexcept {
  for (const char* level : validity.isa) {
    if (!host.isa.has(level)) return Reason::kIsa;
  }
  if (accept_cpu) return Reason::kHit;
  if (std::strcmp(validity.model, host.model.text) != 0) return Reason::kCpuModel;
  if (validity.l2_bytes != host.l2_bytes || validity.l3_bytes != host.l3_bytes) return Reason::kCaches;
  return Reason::kHit;
}

// Where a call goes. `region` is kNoRegion unless one holds the sizes.
struct Choice {
  Reason reason;
  std::int32_t region;
};

// Decides from inputs alone; kHit still needs the outputs to pass. Empty inputs and outputs never reach a variant.
[[nodiscard]] inline Choice choose(const Table& table, const Isa& isa, Call& call) noexcept {
  const bool on_cpu = table.target == Target::kCpu;
  const std::int32_t device_type = on_cpu ? kCpuDevice : kCudaDevice;
  if (const Reason reason = bind_inputs(table.spec, device_type, call); reason != Reason::kHit) {
    return {reason, kNoRegion};
  }
  if (const Reason reason = check_empty(table.spec, call.axes); reason != Reason::kHit) return {reason, kNoRegion};
  const std::int32_t region = find_region(table, call.axes);
  if (region == kNoRegion) return {Reason::kRegion, kNoRegion};
  const Variant& variant = table.variants[table.regions[region].variant];
  if (on_cpu && !isa.has(variant.isa)) return {Reason::kVariantIsa, region};  // of a GPU, its state says as much
  return {check_input_guards(table.spec, variant, call), region};
}

// Holds output `index` to the variant; `foreign` where its memory is the caller's and not freshly allocated.
[[nodiscard]] inline Reason check_output(const Table& table, std::int32_t region, const Call& call, std::int32_t index,
                                         bool foreign) noexcept {
  const Variant& variant = table.variants[table.regions[region].variant];
  const Reason reason = check_output_guard(table.spec, variant, call, index);
  if (reason != Reason::kHit || !foreign) return reason;
  return check_apart(table.spec, call, index);
}

// The call as a kernel sees it; it must not outlive `call`.
[[nodiscard]] inline fibc_call kernel_call(const Call& call, fibc_parallel parallel, const fibc_cuda* cuda) noexcept {
  return {call.inputs, call.outputs, call.scalars, call.axes, parallel, call.num_threads, cuda};
}

[[nodiscard]] inline std::int32_t launch(fibc_kernel entry, const Call& call, fibc_parallel parallel) noexcept {
  const fibc_call bound = kernel_call(call, parallel, nullptr);
  return entry(&bound);
}

}  // namespace fibc

#endif
