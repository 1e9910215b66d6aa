// The CPU this process runs on: instruction sets that it and the operating system support, model, caches.
#ifndef FIBC_CPU_H
#define FIBC_CPU_H

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace fibc {

namespace detail {

struct CpuId {
  std::uint32_t eax = 0;
  std::uint32_t ebx = 0;
  std::uint32_t ecx = 0;
  std::uint32_t edx = 0;
};

// All zero where the CPU has no such leaf.
[[nodiscard]] inline CpuId cpuid(std::uint32_t leaf, std::uint32_t subleaf = 0) noexcept {
  CpuId out;
  if (__get_cpuid_count(leaf, subleaf, &out.eax, &out.ebx, &out.ecx, &out.edx) == 0) return CpuId{};
  return out;
}

[[nodiscard]] constexpr bool bit(std::uint32_t word, int index) noexcept { return ((word >> index) & 1U) != 0; }

// The register state that the operating system saves, XCR0; 0 where it saves none. Raw bytes: the intrinsic needs -mxsave.
[[nodiscard]] inline std::uint64_t saved_state() noexcept {
  if (!bit(cpuid(1).ecx, 27)) return 0;
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (std::uint64_t{high} << 32) | low;
}

}  // namespace detail

// Levels that kernels are compiled for, as fibc.schema.isa defines them. A CPU of one level has those before it.
struct Isa {
  bool avx2 = false;         // AVX2, FMA, F16C
  bool avx512 = false;       // F, BW, DQ, VL
  bool avx512_bf16 = false;  // BF16
  bool amx_bf16 = false;     // TILE, BF16; a process must also ask for it: request_amx()

  // False also for a level that this code cannot vouch for.
  [[nodiscard]] bool has(const char* level) const noexcept {
    if (std::strcmp(level, "avx2") == 0) return avx2;
    if (std::strcmp(level, "avx512") == 0) return avx512;
    if (std::strcmp(level, "avx512_bf16") == 0) return avx512_bf16;
    if (std::strcmp(level, "amx_bf16") == 0) return amx_bf16;
    return false;
  }
};

[[nodiscard]] inline Isa detect_isa() noexcept {
  using detail::bit;
  constexpr std::uint64_t kYmm = 0x6;
  constexpr std::uint64_t kZmm = 0xe6;
  constexpr std::uint64_t kTile = 0x60000;
  const std::uint64_t state = detail::saved_state();
  const detail::CpuId basic = detail::cpuid(1);
  const detail::CpuId extended = detail::cpuid(7, 0);
  const detail::CpuId more = detail::cpuid(7, 1);
  Isa isa;
  isa.avx2 = (state & kYmm) == kYmm && bit(extended.ebx, 5) && bit(basic.ecx, 12) && bit(basic.ecx, 29);
  isa.avx512 = isa.avx2 && (state & kZmm) == kZmm && bit(extended.ebx, 16) && bit(extended.ebx, 30) &&
               bit(extended.ebx, 17) && bit(extended.ebx, 31);
  isa.avx512_bf16 = isa.avx512 && bit(more.eax, 5);
  isa.amx_bf16 = isa.avx512_bf16 && (state & kTile) == kTile && bit(extended.edx, 24) && bit(extended.edx, 22);
  return isa;
}

// Asks Linux to let this process's threads use AMX tiles; false where it refuses. Needed once, before the first use.
[[nodiscard]] inline bool request_amx() noexcept {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// The brand string with outer blanks removed, empty where the CPU has none.
struct CpuModel {
  char text[49] = {};
};

[[nodiscard]] inline CpuModel detect_model() noexcept {
  char raw[49] = {};
  for (std::uint32_t part = 0; part < 3; ++part) {
    const detail::CpuId words = detail::cpuid(0x80000002U + part);
    std::memcpy(raw + 16 * part, &words, 16);
  }
  const char* begin = raw;
  while (*begin == ' ') ++begin;
  std::size_t length = std::strlen(begin);
  while (length > 0 && begin[length - 1] == ' ') --length;
  CpuModel model;
  std::memcpy(model.text, begin, length);
  return model;
}

// Size of CPU 0's data or unified cache of `level` in bytes as the kernel reports it, 0 where it does not.
[[nodiscard]] inline std::int64_t detect_cache_bytes(int level) noexcept {
  for (int index = 0; index < 8; ++index) {
    char path[96];
    char type[16] = {};
    int seen = 0;
    long long size = 0;
    char unit = '\0';
    const auto read = [&](const char* name, const char* format, auto... out) noexcept {
      std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, name);
      std::FILE* file = std::fopen(path, "re");
      if (file == nullptr) return 0;
      const int fields = std::fscanf(file, format, out...);  // NOLINT: format is a literal at every use
      std::fclose(file);
      return fields;
    };
    if (read("level", "%d", &seen) != 1 || seen != level) continue;
    if (read("type", "%15s", type) != 1 || std::strcmp(type, "Instruction") == 0) continue;
    if (read("size", "%lld%c", &size, &unit) < 1) continue;
    return size * (unit == 'K' ? 1024 : unit == 'M' ? 1024 * 1024 : 1);
  }
  return 0;
}

}  // namespace fibc

#endif
