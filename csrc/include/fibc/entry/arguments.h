// Arguments of a call: positional or by keyword into the definition's order.
#ifndef FIBC_ENTRY_ARGUMENTS_H
#define FIBC_ENTRY_ARGUMENTS_H

#include <cstdint>
#include <cstring>

#include "fibc/reason.h"
#include "fibc/table.h"
#include "fibc/entry/tensor_adapter.h"

namespace fibc {

// The parameters of `run` (inputs) or `run_out` (inputs, then outputs), as Python sees them.
struct Signature {
  const char* function;
  const Spec* spec;
  bool with_outputs;

  [[nodiscard]] Py_ssize_t size() const noexcept {
    return spec->inputs.size + (with_outputs ? spec->outputs.size : 0);
  }
  [[nodiscard]] const Argument& operator[](Py_ssize_t i) const noexcept {
    const auto index = static_cast<std::int32_t>(i);
    return index < spec->inputs.size ? spec->inputs[index] : spec->outputs[index - spec->inputs.size];
  }
  // Index of the parameter of that name, or -1. An output that shares its name with an input is called <name>_out.
  [[nodiscard]] Py_ssize_t find(PyObject* name) const noexcept {
    const char* text = PyUnicode_AsUTF8(name);
    if (text == nullptr) {
      PyErr_Clear();
      return -1;
    }
    for (Py_ssize_t i = 0; i < size(); ++i) {
      if (std::strcmp(text, (*this)[i].name) == 0) return i;
    }
    for (Py_ssize_t i = spec->inputs.size; i < size(); ++i) {
      const std::size_t length = std::strlen((*this)[i].name);
      if (std::strncmp(text, (*this)[i].name, length) == 0 && std::strcmp(text + length, "_out") == 0) return i;
    }
    return -1;
  }
};

namespace detail {

// Fills `bound` with borrowed references, None for optional ones left out; false with TypeError set.
[[nodiscard]] inline bool bind_keywords(const Signature& signature, PyObject* const* args, Py_ssize_t num_args,
                                        PyObject* keywords, PyObject** bound) noexcept {
  const Py_ssize_t size = signature.size();
  if (num_args > size) {
    PyErr_Format(PyExc_TypeError, "%s: %s() takes %zd arguments, got %zd", signature.spec->definition,
                 signature.function, size, num_args);
    return false;
  }
  for (Py_ssize_t i = 0; i < size; ++i) bound[i] = i < num_args ? args[i] : nullptr;
  const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t k = 0; k < num_keywords; ++k) {
    PyObject* name = PyTuple_GET_ITEM(keywords, k);
    const Py_ssize_t index = signature.find(name);
    if (index < 0 || bound[index] != nullptr) {
      PyErr_Format(PyExc_TypeError, index < 0 ? "%s: %s() has no argument %R" : "%s: %s() got argument %R twice",
                   signature.spec->definition, signature.function, name);
      return false;
    }
    bound[index] = args[num_args + k];
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (bound[i] != nullptr) continue;
    if (!signature[i].optional) {
      PyErr_Format(PyExc_TypeError, "%s: %s() misses argument '%s'", signature.spec->definition, signature.function,
                   signature[i].name);
      return false;
    }
    bound[i] = Py_None;
  }
  return true;
}

}  // namespace detail

// Returns the arguments in the signature's order, in `args` itself or in `scratch`; null with TypeError set.
[[nodiscard]] inline PyObject* const* bind_arguments(const Signature& signature, PyObject* const* args,
                                                     Py_ssize_t num_args, PyObject* keywords,
                                                     PyObject** scratch) noexcept {
  if (keywords == nullptr && num_args == signature.size()) return args;
  return detail::bind_keywords(signature, args, num_args, keywords, scratch) ? scratch : nullptr;
}

// Reads a Python number; kType where it is none that a double holds exactly, or of another kind than the dtype.
[[nodiscard]] inline Reason read_scalar(DType dtype, PyObject* object, double& value) noexcept {
  constexpr std::uint8_t kLastInteger = 1;  // DLPack's kDLInt and kDLUInt; beside bool, every other code is a float
  constexpr std::uint8_t kBool = 6;
  constexpr std::int64_t kExact = std::int64_t{1} << 53;
  if (dtype.code == kBool) {
    if (!PyBool_Check(object)) return Reason::kType;
    value = object == Py_True ? 1.0 : 0.0;
    return Reason::kHit;
  }
  if (PyLong_CheckExact(object)) {
    int overflow = 0;
    const std::int64_t integer = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0 || integer > kExact || integer < -kExact) return Reason::kType;
    value = static_cast<double>(integer);
    return Reason::kHit;
  }
  if (dtype.code <= kLastInteger || !PyFloat_CheckExact(object)) return Reason::kType;
  value = PyFloat_AS_DOUBLE(object);
  return Reason::kHit;
}

// Reads one argument into a view or a scalar. `grad_mode`: a tensor that requires grad is native's.
[[nodiscard]] inline Reason read_argument(const TensorAdapter& adapter, const Argument& argument, PyObject* object,
                                          bool grad_mode, fibc_tensor& tensor, TensorFacts& facts,
                                          double& scalar) noexcept {
  if (object == Py_None) return Reason::kMissing;
  if (argument.kind == Kind::kScalar) {
    tensor = {nullptr, nullptr, nullptr};
    return read_scalar(argument.dtype, object, scalar);
  }
  if (!adapter.is_plain(object)) return Reason::kType;
  if (grad_mode && adapter.requires_grad(object)) return Reason::kGrad;
  if (!adapter.view(object, tensor, facts)) return Reason::kView;
  if (adapter.is_neg(object)) return Reason::kNegative;  // no dtype of a definition is complex: conj views differ
  scalar = 0.0;
  return Reason::kHit;
}

[[nodiscard]] inline Reason read_inputs(const TensorAdapter& adapter, const Spec& spec, PyObject* const* args,
                                        bool grad_mode, Call& call) noexcept {
  for (std::int32_t i = 0; i < spec.inputs.size; ++i) {
    const Reason reason = read_argument(adapter, spec.inputs[i], args[i], grad_mode, call.inputs[i],
                                        call.input_facts[i], call.scalars[i]);
    if (reason != Reason::kHit) return reason;
  }
  return Reason::kHit;
}

[[nodiscard]] inline Reason read_outputs(const TensorAdapter& adapter, const Spec& spec, PyObject* const* outputs,
                                         bool grad_mode, Call& call) noexcept {
  double unused = 0.0;
  for (std::int32_t i = 0; i < spec.outputs.size; ++i) {
    const Reason reason = read_argument(adapter, spec.outputs[i], outputs[i], grad_mode, call.outputs[i],
                                        call.output_facts[i], unused);
    if (reason != Reason::kHit) return reason;
    if (!adapter.may_write(outputs[i])) return Reason::kInference;
  }
  return Reason::kHit;
}

}  // namespace fibc

#endif
