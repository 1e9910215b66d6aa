// Binding of axes: reads every axis's size from the inputs and holds all arguments to it.
#ifndef FIBC_AXES_H
#define FIBC_AXES_H

#include <cstdint>

#include "fibc/call.h"
#include "fibc/reason.h"
#include "fibc/table.h"

namespace fibc {

namespace detail {

// The first tensor says which of several devices it is.
[[nodiscard]] inline Reason check_facts(const Argument& argument, const TensorFacts& facts, Place& place) noexcept {
  if (facts.place.type != place.type) return Reason::kDevice;
  if (facts.place.index != place.index) {
    if (place.index != kAnyIndex) return Reason::kDevices;
    place.index = facts.place.index;
  }
  if (facts.dtype != argument.dtype) return Reason::kDType;
  if (facts.rank != argument.axes.size) return Reason::kRank;
  return Reason::kHit;
}

// Binds the axes that are still open and compares the others.
[[nodiscard]] inline Reason bind_shape(const Argument& argument, const fibc_tensor& tensor,
                                       std::int64_t* axes) noexcept {
  bool empty = false;
  for (std::int32_t d = 0; d < argument.axes.size; ++d) {
    std::int64_t& size = axes[argument.axes[d]];
    if (size == kVaries) size = tensor.shape[d];
    if (size != tensor.shape[d]) return Reason::kShape;
    empty |= size == 0;
  }
  return tensor.data == nullptr && !empty ? Reason::kNoData : Reason::kHit;
}

}  // namespace detail

// Returns kHit, or the first thing that contradicts the definition, argument by argument.
// `device_type`: where the spec's tensors have to be.
[[nodiscard]] inline Reason bind_inputs(const Spec& spec, std::int32_t device_type, Call& call) noexcept {
  call.place = {device_type, device_type == kCpuDevice ? 0 : kAnyIndex};
  for (std::int32_t i = 0; i < spec.axes.size; ++i) call.axes[i] = spec.axes[i].value;
  for (std::int32_t i = 0; i < spec.inputs.size; ++i) {
    const Argument& argument = spec.inputs[i];
    if (argument.kind == Kind::kScalar) continue;
    Reason reason = detail::check_facts(argument, call.input_facts[i], call.place);
    if (reason == Reason::kHit) reason = detail::bind_shape(argument, call.inputs[i], call.axes);
    if (reason != Reason::kHit) return reason;
  }
  for (std::int32_t i = 0; i < spec.axes.size; ++i) {
    if (call.axes[i] == kVaries) return Reason::kShape;  // no input has it: the size of an output is unknown
  }
  return call.place.index == kAnyIndex ? Reason::kDevice : Reason::kHit;  // no tensor says which
}

// Holds the caller's own outputs to axes that bind_inputs has bound.
[[nodiscard]] inline Reason check_outputs(const Spec& spec, Call& call) noexcept {
  for (std::int32_t i = 0; i < spec.outputs.size; ++i) {
    const Argument& argument = spec.outputs[i];
    Reason reason = detail::check_facts(argument, call.output_facts[i], call.place);
    if (reason == Reason::kHit) reason = detail::bind_shape(argument, call.outputs[i], call.axes);
    if (reason != Reason::kHit) return reason;
  }
  return Reason::kHit;
}

[[nodiscard]] inline bool is_empty(const Argument& argument, const std::int64_t* axes) noexcept {
  for (const std::int32_t axis : argument.axes) {
    if (axes[axis] == 0) return true;
  }
  return false;
}

// kEmpty where every output is empty, kEmptyInput where only inputs are, else kHit.
[[nodiscard]] inline Reason check_empty(const Spec& spec, const std::int64_t* axes) noexcept {
  bool all_outputs = true;
  bool some = false;
  for (const Argument& output : spec.outputs) {
    const bool empty = is_empty(output, axes);
    all_outputs &= empty;
    some |= empty;
  }
  if (all_outputs) return Reason::kEmpty;
  for (const Argument& input : spec.inputs) some |= is_empty(input, axes);
  return some ? Reason::kEmptyInput : Reason::kHit;
}

}  // namespace fibc

#endif
