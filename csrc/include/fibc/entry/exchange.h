// DLPack's C exchange interface of torch: views of tensors and new tensors. Takes the structures from torch's own copy.
#ifndef FIBC_ENTRY_EXCHANGE_H
#define FIBC_ENTRY_EXCHANGE_H

#include <Python.h>

#include <ATen/dlpack.h>

#include "fibc/call.h"
#include "fibc/entry/ref.h"

namespace fibc {

static_assert(kCpuDevice == kDLCPU);
static_assert(kCudaDevice == kDLCUDA);

class Exchange {
 public:
  // False, with no error set, where `tensor_type` has no interface of the major version compiled here.
  [[nodiscard]] bool start(const Ref& tensor_type) noexcept {
    const Ref capsule = tensor_type.attribute("__dlpack_c_exchange_api__");
    const auto* header = static_cast<const DLPackExchangeAPIHeader*>(
        capsule ? PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api") : nullptr);
    while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION) header = header->prev_api;
    api_ = reinterpret_cast<const DLPackExchangeAPI*>(header);
    PyErr_Clear();
    return api_ != nullptr && api_->dltensor_from_py_object_no_sync != nullptr;
  }

  // False, with no error set, where torch cannot describe the tensor.
  [[nodiscard]] bool view(PyObject* object, fibc_tensor& tensor, TensorFacts& facts) const noexcept {
    DLTensor raw;
    if (api_->dltensor_from_py_object_no_sync(object, &raw) != 0) {
      PyErr_Clear();
      return false;
    }
    tensor.data = raw.data == nullptr ? nullptr : static_cast<char*>(raw.data) + raw.byte_offset;
    tensor.shape = raw.shape;
    tensor.strides = raw.strides;
    facts.dtype = {raw.dtype.code, raw.dtype.bits, raw.dtype.lanes};
    facts.rank = raw.ndim;
    facts.place = {kOtherDevice, 0};
    if (raw.device.device_type == kDLCPU) facts.place.type = kCpuDevice;
    if (raw.device.device_type == kDLCUDA) facts.place = {kCudaDevice, raw.device.device_id};
    return true;
  }

  // A new contiguous tensor on a CPU or a GPU and its memory; null, with no error set, where torch makes none.
  [[nodiscard]] Ref empty(DType dtype, std::int32_t rank, std::int64_t* shape, Place place, void*& data) const noexcept {
    DLTensor prototype{};
    prototype.device = {place.type == kCpuDevice ? kDLCPU : kDLCUDA, place.index};
    prototype.ndim = rank;
    prototype.dtype = {dtype.code, dtype.bits, dtype.lanes};
    prototype.shape = shape;
    DLManagedTensorVersioned* managed = nullptr;
    if (api_->managed_tensor_allocator(&prototype, &managed, nullptr, ignore_message) != 0) {
      PyErr_Clear();
      return Ref();
    }
    data = managed->dl_tensor.data;
    void* object = nullptr;
    if (api_->managed_tensor_to_py_object_no_sync(managed, &object) != 0) {
      PyErr_Clear();
      return Ref();
    }
    return Ref(static_cast<PyObject*>(object));
  }

  // Torch's current stream on a GPU; false, with no error set, where it does not say.
  [[nodiscard]] bool current_stream(std::int32_t device, void*& stream) const noexcept {
    if (api_->current_work_stream == nullptr || api_->current_work_stream(kDLCUDA, device, &stream) != 0) {
      PyErr_Clear();
      return false;
    }
    return true;
  }

 private:
  static void ignore_message(void*, const char*, const char*) noexcept {}

  const DLPackExchangeAPI* api_ = nullptr;
};

}  // namespace fibc

#endif
