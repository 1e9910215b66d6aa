// Element types, coded as DLPack codes them.
#ifndef FIBC_DTYPE_H
#define FIBC_DTYPE_H

#include <cstdint>

namespace fibc {

// Trivial: a call holds 80 of them uninitialised.
struct DType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;

  [[nodiscard]] constexpr bool operator==(const DType& other) const noexcept {
    return code == other.code && bits == other.bits && lanes == other.lanes;
  }
  [[nodiscard]] constexpr bool operator!=(const DType& other) const noexcept { return !(*this == other); }

  [[nodiscard]] constexpr std::int64_t size_bytes() const noexcept { return (std::int64_t{bits} * lanes + 7) / 8; }
};

struct NamedDType {
  const char* name;
  DType dtype;
};

// The definition's names. float4_e2m1 travels as torch.float4_e2m1fn_x2, two values a byte.
inline constexpr NamedDType kDTypes[] = {
    {"float32", {2, 32, 1}}, {"float16", {2, 16, 1}},        {"bfloat16", {4, 16, 1}},
    {"int64", {0, 64, 1}},   {"int32", {0, 32, 1}},          {"int16", {0, 16, 1}},
    {"int8", {0, 8, 1}},     {"uint8", {1, 8, 1}},           {"bool", {6, 8, 1}},
    {"float64", {2, 64, 1}}, {"float8_e4m3fn", {10, 8, 1}},  {"float8_e5m2", {12, 8, 1}},
    {"float4_e2m1", {17, 4, 2}},
};

namespace detail {
[[nodiscard]] constexpr bool same_text(const char* a, const char* b) noexcept {
  while (*a != '\0' && *a == *b) {
    ++a;
    ++b;
  }
  return *a == *b;
}
}  // namespace detail

// Returns a dtype of 0 bits where no dtype has that name.
[[nodiscard]] constexpr DType dtype_of(const char* name) noexcept {
  for (const NamedDType& entry : kDTypes) {
    if (detail::same_text(entry.name, name)) return entry.dtype;
  }
  return DType{};
}

}  // namespace fibc

#endif
