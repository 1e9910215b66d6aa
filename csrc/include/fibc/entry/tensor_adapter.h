// What a call asks torch about its tensors: through torch's C interface where it is complete, else DLPack and Python.
#ifndef FIBC_ENTRY_TENSOR_ADAPTER_H
#define FIBC_ENTRY_TENSOR_ADAPTER_H

#include <cstdint>
#include <cstring>

#include "fibc/call.h"
#include "fibc/entry/exchange.h"
#include "fibc/entry/ref.h"
#include "fibc/loaded_library.h"
#include "fibc/torch_abi.h"

namespace fibc {

// One per module, never freed (at exit, Python ends before static objects do). The GIL is held in every call.
class TensorAdapter {
 public:
  // Reads `module`, the imported torch. False, with no error set, where it cannot exchange tensors.
  [[nodiscard]] bool start(PyObject* module) noexcept {
    const Ref torch = Ref::borrow(module);
    tensor_type_ = torch.attribute("Tensor");
    parameter_type_ = torch.attribute("nn").attribute("Parameter");
    is_neg_ = tensor_type_.attribute("is_neg");
    is_inference_ = tensor_type_.attribute("is_inference");
    requires_grad_ = Ref(PyUnicode_InternFromString("requires_grad"));
    is_grad_enabled_ = torch.attribute("is_grad_enabled");
    is_inference_mode_enabled_ = torch.attribute("is_inference_mode_enabled");
    get_num_threads_ = torch.attribute("get_num_threads");
    num_dispatch_modes_ = torch.attribute("_C").attribute("_len_torch_dispatch_stack");
    increment_version_ = torch.attribute("autograd").attribute("graph").attribute("increment_version");
    forward_ad_names_ = torch.attribute("autograd").attribute("forward_ad").attribute("__dict__");
    current_level_ = Ref(PyUnicode_InternFromString("_current_level"));
    const Ref file = torch.attribute("_C").attribute("__file__");
    if (const char* path = file ? PyUnicode_AsUTF8(file.get()) : nullptr; path != nullptr) {
      library_ = LoadedLibrary(path);
    }
    fast_ = abi_.start(library_) && library_.find(wrap_, "_Z16THPVariable_WrapRKN2at10TensorBaseE") &&
            find_handle_offset(torch);
    PyErr_Clear();
    return exchange_.start(tensor_type_) && parameter_type_ && is_neg_ && is_inference_ && requires_grad_ &&
           is_grad_enabled_ && is_inference_mode_enabled_ && get_num_threads_ && num_dispatch_modes_ &&
           increment_version_ && forward_ad_names_ && current_level_;
  }

  // Whether torch's C interface answers; `use_abi(false)` gives it up, as with a torch that lacks it.
  [[nodiscard]] bool uses_abi() const noexcept { return fast_; }
  void use_abi(bool use) noexcept { fast_ = use && handle_offset_ != 0; }

  // Whether new tensors come from an allocation that torch fills where it was asked to (torch.utils.deterministic). The
  // one of its C interface never does.
  void fill(bool fills) noexcept { fills_ = fills; }

  [[nodiscard]] const LoadedLibrary& library() const noexcept { return library_; }

  [[nodiscard]] bool is_plain(PyObject* object) const noexcept {
    PyTypeObject* type = Py_TYPE(object);
    return type == reinterpret_cast<PyTypeObject*>(tensor_type_.get()) ||
           type == reinterpret_cast<PyTypeObject*>(parameter_type_.get());
  }

  // torch.get_num_threads() of the calling thread.
  [[nodiscard]] std::int32_t num_threads() const noexcept {
    return fast_ ? abi_.num_threads() : static_cast<std::int32_t>(number(get_num_threads_));
  }

  [[nodiscard]] bool grad_mode() const noexcept {
    return fast_ ? abi_.grad_mode_is_enabled() : number(is_grad_enabled_) != 0;
  }

  // Something sees every operator (a tracer, a counter, fake tensors), or a forward-mode level is open: a view shows
  // neither.
  [[nodiscard]] bool is_watched() const noexcept {
    PyObject* level = PyDict_GetItemWithError(forward_ad_names_.get(), current_level_.get());
    if (level == nullptr || PyLong_AsLong(level) >= 0) return true;
    return fast_ ? abi_.in_dispatch_mode() : number(num_dispatch_modes_) != 0;
  }

  [[nodiscard]] bool requires_grad(PyObject* tensor) const noexcept {
    return fast_ ? abi_.requires_grad(handle(tensor)) : is_true(Ref(PyObject_GetAttr(tensor, requires_grad_.get())));
  }

  [[nodiscard]] bool is_neg(PyObject* tensor) const noexcept {
    return fast_ ? abi_.is_neg(handle(tensor)) : is_true(Ref(PyObject_CallOneArg(is_neg_.get(), tensor)));
  }

  // False where torch would refuse to write: an inference tensor outside inference mode.
  [[nodiscard]] bool may_write(PyObject* tensor) const noexcept {
    if (!is_inference(tensor)) return true;
    return fast_ ? abi_.inference_mode_is_enabled() : number(is_inference_mode_enabled_) == 1;
  }

  // Tells autograd that `tensor` was written, so that a graph which saved it raises instead of using the new values.
  // False with a Python error set where that failed.
  [[nodiscard]] bool mark_written(PyObject* tensor) const noexcept {
    if (is_inference(tensor)) return true;  // keeps no version
    if (!fast_) return static_cast<bool>(Ref(PyObject_CallOneArg(increment_version_.get(), tensor)));
    abi_.bump_version(handle(tensor));
    return true;
  }

  // Views a plain tensor; false, with no error set, where it is no strided memory.
  [[nodiscard]] bool view(PyObject* object, fibc_tensor& tensor, TensorFacts& facts) const noexcept {
    return fast_ ? abi_.view(handle(object), tensor, facts) : exchange_.view(object, tensor, facts);
  }

  // A new contiguous tensor of torch's own allocator; null, with no error set, where torch makes none.
  [[nodiscard]] Ref empty(DType dtype, std::int32_t rank, std::int64_t* shape, const std::int64_t* strides, Place place,
                          void*& data) const noexcept {
    if (!fast_ || fills_) return exchange_.empty(dtype, rank, shape, place, data);
    const TensorHandle made = abi_.empty(dtype, rank, shape, strides, place);
    if (made == nullptr) return Ref();
    data = abi_.data(made);
    Ref object(wrap_(made));
    abi_.release(made);
    if (!object) PyErr_Clear();
    return object;
  }

  // Torch's current stream on a GPU; false, with no error set, where it does not say.
  [[nodiscard]] bool current_stream(std::int32_t device, void*& stream) const noexcept {
    return fast_ && abi_.has_streams() ? abi_.current_stream(device, stream) : exchange_.current_stream(device, stream);
  }

 private:
  // Result of a builtin without arguments as a number; -1, with no error set, where it fails.
  [[nodiscard]] static long number(const Ref& function) noexcept {
    const Ref result(PyObject_CallNoArgs(function.get()));
    const long value = result ? PyLong_AsLong(result.get()) : -1;
    PyErr_Clear();
    return value;
  }

  // A failure to answer counts as true: the call goes native.
  [[nodiscard]] static bool is_true(const Ref& value) noexcept {
    const bool truth = !value || PyObject_IsTrue(value.get()) != 0;
    PyErr_Clear();
    return truth;
  }

  [[nodiscard]] bool is_inference(PyObject* tensor) const noexcept {
    return fast_ ? abi_.is_inference(handle(tensor)) : is_true(Ref(PyObject_CallOneArg(is_inference_.get(), tensor)));
  }

  [[nodiscard]] TensorHandle handle(PyObject* tensor) const noexcept {
    return reinterpret_cast<char*>(tensor) + handle_offset_;
  }

  // Finds the word of a tensor object that holds its TensorImpl's address, by comparing several objects with `_cdata`.
  [[nodiscard]] bool find_handle_offset(const Ref& torch) noexcept {
    const Ref plain(PyObject_CallMethod(torch.get(), "zeros", "ii", 2, 3));
    const Ref view(plain ? PyObject_CallMethod(plain.get(), "t", nullptr) : nullptr);
    const Ref parameter(plain ? PyObject_CallOneArg(parameter_type_.get(), plain.get()) : nullptr);
    if (!plain || !view || !parameter) return false;
    constexpr auto kWord = static_cast<Py_ssize_t>(sizeof(void*));
    const Py_ssize_t size = reinterpret_cast<PyTypeObject*>(tensor_type_.get())->tp_basicsize;
    for (auto offset = static_cast<Py_ssize_t>(sizeof(PyObject)); offset + kWord <= size; offset += kWord) {
      bool found = true;
      for (const Ref* probe : {&plain, &view, &parameter}) {
        const Ref address = probe->attribute("_cdata");
        void* seen = nullptr;
        std::memcpy(&seen, reinterpret_cast<char*>(probe->get()) + offset, sizeof seen);
        found = found && address && seen != nullptr && seen == PyLong_AsVoidPtr(address.get());
      }
      if (found) {
        handle_offset_ = offset;
        return true;
      }
    }
    return false;
  }

  Exchange exchange_;
  LoadedLibrary library_;
  TorchAbi abi_;
  PyObject* (*wrap_)(TensorHandle) = nullptr;  // THPVariable_Wrap: a new reference
  Py_ssize_t handle_offset_ = 0;
  bool fast_ = false;
  bool fills_ = false;
  Ref tensor_type_;
  Ref parameter_type_;
  Ref is_neg_;
  Ref is_inference_;
  Ref requires_grad_;  // the attribute's name
  Ref is_grad_enabled_;
  Ref is_inference_mode_enabled_;
  Ref get_num_threads_;
  Ref num_dispatch_modes_;
  Ref increment_version_;
  Ref forward_ad_names_;
  Ref current_level_;
};

}  // namespace fibc

#endif
