// Layouts, offsets, alignment and overlap of tensors.
#include "check.h"
#include "fibc/guards.h"

using namespace fibc;

namespace {

alignas(64) float memory[64];

struct View {
  std::int64_t shape[3];
  std::int64_t strides[3];
  std::int32_t rank;
  void* data = memory;

  [[nodiscard]] fibc_tensor tensor() const { return {data, shape, strides}; }
};

constexpr std::int32_t kTwoAxes[] = {0, 1};
constexpr Argument kFloats{"x", Kind::kTensor, dtype_of("float32"), kTwoAxes, false, kNoAlias};
constexpr Argument kHalves{"x", Kind::kTensor, dtype_of("bfloat16"), kTwoAxes, false, kNoAlias};

void strides_of_size_one_axes_never_matter() {
  const View one{{1, 8, 1}, {7777, 1, -5}, 3};
  CHECK(is_contiguous(one.tensor(), 3));
  CHECK(has_rows(one.tensor(), 3));
  CHECK(is_injective(one.tensor(), 3));
  CHECK(last_offset(one.tensor(), 3) == 7);
}

void layouts_are_told_apart() {
  const View plain{{2, 3, 4}, {12, 4, 1}, 3};
  const View padded{{2, 3, 4}, {40, 10, 1}, 3};
  const View expanded{{2, 3, 4}, {0, 4, 1}, 3};
  const View transposed{{3, 4, 0}, {1, 3, 0}, 2};
  const View backwards{{3, 4, 0}, {-4, 1, 0}, 2};
  CHECK(is_contiguous(plain.tensor(), 3) && has_rows(plain.tensor(), 3) && is_injective(plain.tensor(), 3));
  CHECK(!is_contiguous(padded.tensor(), 3) && has_rows(padded.tensor(), 3) && is_injective(padded.tensor(), 3));
  CHECK(!is_contiguous(expanded.tensor(), 3) && has_rows(expanded.tensor(), 3) && !is_injective(expanded.tensor(), 3));
  CHECK(!is_contiguous(transposed.tensor(), 2) && !has_rows(transposed.tensor(), 2));
  CHECK(!has_rows(backwards.tensor(), 2));
  const View scalar{{0, 0, 0}, {0, 0, 0}, 0};
  CHECK(is_contiguous(scalar.tensor(), 0) && has_rows(scalar.tensor(), 0) && last_offset(scalar.tensor(), 0) == 0);
}

void the_first_guard_that_fails_is_named() {
  View view{{4, 4, 0}, {5, 1, 0}, 2, reinterpret_cast<char*>(memory) + 4};
  const auto check = [&](Layout layout, std::int32_t alignment, std::int64_t offset) {
    return check_guard({layout, alignment}, view.tensor(), kFloats, offset);
  };
  CHECK(check(Layout::kContiguous, 16, 3) == Reason::kLayout);
  CHECK(check(Layout::kRows, 16, 17) == Reason::kOffset);
  CHECK(check(Layout::kRows, 8, 18) == Reason::kAlignment);
  CHECK(check(Layout::kRows, 4, 18) == Reason::kHit);
  CHECK(check(Layout::kAny, 1, 18) == Reason::kHit);
}

void offsets_are_counted_in_64_bits() {
  const View huge{{320, 2, 0}, {7864320, 1, 0}, 2};
  CHECK(last_offset(huge.tensor(), 2) == 319LL * 7864320 + 1);
  CHECK(check_guard({Layout::kRows, 1}, huge.tensor(), kFloats, (1LL << 31) - 1) == Reason::kOffset);
}

void rows_at_a_callers_distance_are_as_aligned_as_the_first() {
  const auto check = [](std::int64_t rows, std::int64_t columns, std::int64_t stride, Layout layout) {
    const View view{{rows, columns, 0}, {stride, 1, 0}, 2, memory};
    return check_guard({layout, 16}, view.tensor(), kHalves, 1 << 20);
  };
  CHECK(check(4, 64, 72, Layout::kRows) == Reason::kHit);
  CHECK(check(4, 64, 65, Layout::kRows) == Reason::kAlignment);  // 130 bytes
  CHECK(check(4, 64, 0, Layout::kRows) == Reason::kHit);         // every row is the first
  CHECK(check(1, 64, 65, Layout::kRows) == Reason::kHit);        // there is one row
  CHECK(check(4, 63, 63, Layout::kRows) == Reason::kHit);        // row-major: the definition's sizes decide
  CHECK(check(4, 64, 65, Layout::kAny) == Reason::kHit);
}

void written_memory_is_held_apart() {
  static constexpr std::int32_t kAxes[] = {0};
  static constexpr Argument kInputs[] = {{"x", Kind::kTensor, dtype_of("float32"), kAxes, false, kNoAlias},
                                         {"s", Kind::kScalar, dtype_of("float32"), {}, false, kNoAlias}};
  static constexpr Argument kFresh[] = {{"y", Kind::kTensor, dtype_of("float32"), kAxes, false, kNoAlias},
                                        {"z", Kind::kTensor, dtype_of("float32"), kAxes, false, kNoAlias}};
  static constexpr Argument kInPlace[] = {{"x", Kind::kTensor, dtype_of("float32"), kAxes, false, 0}};
  static constexpr std::int64_t kShape[] = {8};
  static constexpr std::int64_t kStrides[] = {1};
  const auto at = [](int first) { return fibc_tensor{memory + first, kShape, kStrides}; };
  Call call;
  call.inputs[0] = at(0);
  call.inputs[1] = {nullptr, nullptr, nullptr};
  const Spec fresh{"f", {}, kInputs, kFresh};
  const Spec in_place{"g", {}, kInputs, kInPlace};
  call.outputs[0] = at(8);
  call.outputs[1] = at(15);
  CHECK(check_apart(fresh, call, 0) == Reason::kHit);
  CHECK(check_apart(fresh, call, 1) == Reason::kOverlap);
  call.outputs[1] = at(16);
  CHECK(check_apart(fresh, call, 1) == Reason::kHit);
  call.outputs[0] = at(7);
  CHECK(check_apart(fresh, call, 0) == Reason::kOverlap);
  CHECK(check_apart(in_place, call, 0) == Reason::kAlias);
  call.outputs[0] = at(0);
  CHECK(check_apart(in_place, call, 0) == Reason::kHit);
  CHECK(check_apart(fresh, call, 0) == Reason::kOverlap);
}

}  // namespace

int main() {
  strides_of_size_one_axes_never_matter();
  layouts_are_told_apart();
  the_first_guard_that_fails_is_named();
  offsets_are_counted_in_64_bits();
  rows_at_a_callers_distance_are_as_aligned_as_the_first();
  written_memory_is_held_apart();
  return fibc_tests::failures != 0;
}
