// Outputs of a call by value: fresh tensors, or the inputs that the definition writes in place.
#ifndef FIBC_ENTRY_OUTPUTS_H
#define FIBC_ENTRY_OUTPUTS_H

#include "fibc/call.h"
#include "fibc/reason.h"
#include "fibc/table.h"
#include "fibc/entry/tensor_adapter.h"

namespace fibc {

class Outputs {
 public:
  explicit Outputs(const Spec& spec) noexcept : spec_(spec) {}

  // Makes output `i` of the bound call and views it in `call.outputs[i]`.
  [[nodiscard]] Reason make(const TensorAdapter& adapter, PyObject* const* args, Call& call, std::int32_t i) noexcept {
    const Argument& output = spec_.outputs[i];
    if (output.alias != kNoAlias) {
      call.outputs[i] = call.inputs[output.alias];
      tensors_[i] = Ref::borrow(args[output.alias]);
      return adapter.may_write(args[output.alias]) ? Reason::kHit : Reason::kInference;
    }
    std::int64_t stride = 1;
    bool empty = false;
    for (std::int32_t d = output.axes.size - 1; d >= 0; --d) {
      const std::int64_t size = call.axes[output.axes[d]];
      shapes_[i][d] = size;
      strides_[i][d] = stride;
      stride *= size;
      empty |= size == 0;
    }
    void* data = nullptr;
    tensors_[i] = adapter.empty(output.dtype, output.axes.size, shapes_[i], strides_[i], call.place, data);
    if (!tensors_[i] || (data == nullptr && !empty)) return Reason::kAllocation;
    call.outputs[i] = {data, shapes_[i], strides_[i]};
    return Reason::kHit;
  }

  // Tells autograd of the inputs that were written in place; false with a Python error set.
  [[nodiscard]] bool mark_written(const TensorAdapter& adapter) const noexcept {
    for (std::int32_t i = 0; i < spec_.outputs.size; ++i) {
      if (spec_.outputs[i].alias != kNoAlias && !adapter.mark_written(tensors_[i].get())) return false;
    }
    return true;
  }

  // The one output, or a tuple of all; null with MemoryError set.
  [[nodiscard]] PyObject* result() noexcept {
    const std::int32_t size = spec_.outputs.size;
    if (size == 1) return tensors_[0].release();
    PyObject* tuple = PyTuple_New(size);
    if (tuple == nullptr) return nullptr;
    for (std::int32_t i = 0; i < size; ++i) PyTuple_SET_ITEM(tuple, i, tensors_[i].release());
    return tuple;
  }

 private:
  const Spec& spec_;
  Ref tensors_[kMaxOutputs];
  std::int64_t shapes_[kMaxOutputs][kMaxRank];
  std::int64_t strides_[kMaxOutputs][kMaxRank];
};

}  // namespace fibc

#endif
