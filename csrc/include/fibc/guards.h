// What a variant assumes of memory: layout, offsets, alignment, and no overlap of what it writes.
#ifndef FIBC_GUARDS_H
#define FIBC_GUARDS_H

#include <cstdint>

#include "fibc/call.h"
#include "fibc/reason.h"
#include "fibc/table.h"

namespace fibc {

[[nodiscard]] constexpr bool is_contiguous(const fibc_tensor& tensor, std::int32_t rank) noexcept {
  std::int64_t expected = 1;
  for (std::int32_t d = rank - 1; d >= 0; --d) {
    if (tensor.shape[d] == 1) continue;
    if (tensor.strides[d] != expected) return false;
    expected *= tensor.shape[d];
  }
  return true;
}

[[nodiscard]] constexpr bool has_rows(const fibc_tensor& tensor, std::int32_t rank) noexcept {
  for (std::int32_t d = 0; d < rank; ++d) {
    if (tensor.shape[d] == 1) continue;
    if (d == rank - 1 ? tensor.strides[d] != 1 : tensor.strides[d] < 0) return false;
  }
  return true;
}

// No two elements share memory, judged as row-major order does: each stride clears the extent of the axes after it.
[[nodiscard]] constexpr bool is_injective(const fibc_tensor& tensor, std::int32_t rank) noexcept {
  std::int64_t extent = 0;
  for (std::int32_t d = rank - 1; d >= 0; --d) {
    if (tensor.shape[d] == 1) continue;
    if (tensor.strides[d] <= extent) return false;
    extent += (tensor.shape[d] - 1) * tensor.strides[d];
  }
  return true;
}

// Offset of the last element from the first, in elements; strides are not negative, the tensor is not empty.
[[nodiscard]] constexpr std::int64_t last_offset(const fibc_tensor& tensor, std::int32_t rank) noexcept {
  std::int64_t offset = 0;
  for (std::int32_t d = 0; d < rank; ++d) offset += (tensor.shape[d] - 1) * tensor.strides[d];
  return offset;
}

[[nodiscard]] inline bool is_aligned(const void* data, std::int32_t alignment_bytes) noexcept {
  return (reinterpret_cast<std::uintptr_t>(data) & (static_cast<std::uintptr_t>(alignment_bytes) - 1)) == 0;
}

// Whether a caller's strides keep every row as aligned as the first. Of row-major ones the definition's sizes decide.
[[nodiscard]] constexpr bool has_aligned_rows(const fibc_tensor& tensor, std::int32_t rank, std::int64_t elem_bytes,
                                              std::int32_t alignment_bytes) noexcept {
  if (alignment_bytes == 1 || is_contiguous(tensor, rank)) return true;
  for (std::int32_t d = 0; d < rank - 1; ++d) {
    if (tensor.shape[d] != 1 && tensor.strides[d] * elem_bytes % alignment_bytes != 0) return false;
  }
  return true;
}

[[nodiscard]] inline Reason check_guard(const TensorGuard& guard, const fibc_tensor& tensor, const Argument& argument,
                                        std::int64_t max_offset_elems) noexcept {
  const std::int32_t rank = argument.axes.size;
  if (guard.layout == Layout::kContiguous && !is_contiguous(tensor, rank)) return Reason::kLayout;
  if (guard.layout == Layout::kRows && !has_rows(tensor, rank)) return Reason::kLayout;
  if (last_offset(tensor, rank) > max_offset_elems) return Reason::kOffset;
  if (!is_aligned(tensor.data, guard.alignment_bytes)) return Reason::kAlignment;
  if (guard.layout == Layout::kRows &&
      !has_aligned_rows(tensor, rank, argument.dtype.size_bytes(), guard.alignment_bytes)) {
    return Reason::kAlignment;
  }
  return Reason::kHit;
}

[[nodiscard]] inline Reason check_input_guards(const Spec& spec, const Variant& variant, const Call& call) noexcept {
  for (std::int32_t i = 0; i < spec.inputs.size; ++i) {
    if (spec.inputs[i].kind == Kind::kScalar) continue;
    const Reason reason = check_guard(variant.inputs[i], call.inputs[i], spec.inputs[i], variant.max_offset_elems);
    if (reason != Reason::kHit) return reason;
  }
  return Reason::kHit;
}

[[nodiscard]] inline Reason check_output_guard(const Spec& spec, const Variant& variant, const Call& call,
                                               std::int32_t index) noexcept {
  const fibc_tensor& tensor = call.outputs[index];
  const Argument& output = spec.outputs[index];
  if (!is_injective(tensor, output.axes.size)) return Reason::kLayout;
  return check_guard(variant.outputs[index], tensor, output, variant.max_offset_elems);
}

// Half-open range of bytes that a tensor's elements span.
struct Extent {
  std::uintptr_t begin;
  std::uintptr_t end;
};

[[nodiscard]] inline Extent extent_of(const fibc_tensor& tensor, const Argument& argument) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data);
  const std::int64_t bytes = (last_offset(tensor, argument.axes.size) + 1) * argument.dtype.size_bytes();
  return {begin, begin + static_cast<std::uintptr_t>(bytes)};
}

[[nodiscard]] constexpr bool overlap(const Extent& a, const Extent& b) noexcept {
  return a.begin < b.end && b.begin < a.end;
}

[[nodiscard]] constexpr bool same_view(const fibc_tensor& a, const fibc_tensor& b, std::int32_t rank) noexcept {
  if (a.data != b.data) return false;
  for (std::int32_t d = 0; d < rank; ++d) {
    if (a.shape[d] != 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

// Holds output `index`, memory of the caller, apart from every input but its alias and from the outputs before it.
[[nodiscard]] inline Reason check_apart(const Spec& spec, const Call& call, std::int32_t index) noexcept {
  const Argument& output = spec.outputs[index];
  if (output.alias != kNoAlias && !same_view(call.outputs[index], call.inputs[output.alias], output.axes.size)) {
    return Reason::kAlias;
  }
  const Extent extent = extent_of(call.outputs[index], output);
  for (std::int32_t i = 0; i < spec.inputs.size; ++i) {
    if (i == output.alias || spec.inputs[i].kind == Kind::kScalar) continue;
    if (overlap(extent, extent_of(call.inputs[i], spec.inputs[i]))) return Reason::kOverlap;
  }
  for (std::int32_t i = 0; i < index; ++i) {
    if (overlap(extent, extent_of(call.outputs[i], spec.outputs[i]))) return Reason::kOverlap;
  }
  return Reason::kHit;
}

}  // namespace fibc

#endif
