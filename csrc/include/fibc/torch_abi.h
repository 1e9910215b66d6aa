// Torch's stable C interface (`aoti_torch_*`) and the few functions beside it that a call needs, bound by name.
// It answers about a tensor in 2-5 ns where a Python method takes 100 and a DLPack view 70 (2 vCPU Xeon, torch 2.13.0,
// 2026-11-30, benchmarks/dispatch_overhead.py).
#ifndef FIBC_TORCH_ABI_H
#define FIBC_TORCH_ABI_H

#include <cstdint>

#include "fibc/call.h"
#include "fibc/dtype.h"
#include "fibc/loaded_library.h"

namespace fibc {

// What torch's headers call AtenTensorHandle: points to a word that holds the address of a TensorImpl.
using TensorHandle = void*;

// Usable as a whole or not at all: where one function is missing, callers ask Python and DLPack instead.
class TorchAbi {
 public:
  // False where `library` (torch's loaded extension) lacks one of the functions.
  [[nodiscard]] bool start(const LoadedLibrary& library) noexcept {
    usable_ = library.find(grad_mode_is_enabled_, "_ZN3c108GradMode10is_enabledEv") &&
              library.find(inference_mode_is_enabled_, "_ZN3c1013InferenceMode10is_enabledEv") &&
              library.find(num_dispatch_modes_, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv") &&
              library.find(get_num_threads_, "_ZN2at15get_num_threadsEv") &&
              library.find(is_neg_, "_ZN2at6native6is_negERKNS_6TensorE") &&
              library.find(is_inference_, "_ZN2at6native12is_inferenceERKNS_6TensorE") &&
              library.find(requires_grad_, "_ZNK3c1010TensorImpl13requires_gradEv") &&
              library.find(has_storage_, "_ZNK3c1010TensorImpl11has_storageEv") &&
              library.find(bump_version_, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE") &&
              library.find(get_device_type_, "aoti_torch_get_device_type") &&
              library.find(get_device_index_, "aoti_torch_get_device_index") &&
              library.find(get_dtype_, "aoti_torch_get_dtype") && library.find(get_dim_, "aoti_torch_get_dim") &&
              library.find(get_sizes_, "aoti_torch_get_sizes") &&
              library.find(get_strides_, "aoti_torch_get_strides") &&
              library.find(get_data_ptr_, "aoti_torch_get_data_ptr") &&
              library.find(empty_strided_, "aoti_torch_empty_strided") &&
              library.find(delete_tensor_, "aoti_torch_delete_tensor_object") && read_codes(library);
    (void)library.find(get_current_cuda_stream_, "aoti_torch_get_current_cuda_stream");  // a torch for CPUs has none
    return usable_;
  }

  [[nodiscard]] bool usable() const noexcept { return usable_; }

  [[nodiscard]] bool grad_mode_is_enabled() const noexcept { return grad_mode_is_enabled_(); }
  [[nodiscard]] bool inference_mode_is_enabled() const noexcept { return inference_mode_is_enabled_(); }
  [[nodiscard]] bool in_dispatch_mode() const noexcept { return num_dispatch_modes_() != 0; }
  [[nodiscard]] std::int32_t num_threads() const noexcept { return get_num_threads_(); }

  [[nodiscard]] bool is_neg(TensorHandle tensor) const noexcept { return is_neg_(tensor); }
  [[nodiscard]] bool is_inference(TensorHandle tensor) const noexcept { return is_inference_(tensor); }
  [[nodiscard]] bool requires_grad(TensorHandle tensor) const noexcept { return requires_grad_(impl(tensor)); }
  void bump_version(TensorHandle tensor) const noexcept { bump_version_(tensor); }

  // False where the tensor is no strided memory: sparse, mkldnn, meta, a wrapper of vmap or of functionalisation.
  [[nodiscard]] bool view(TensorHandle handle, fibc_tensor& tensor, TensorFacts& facts) const noexcept {
    std::int32_t device = 0;
    std::int32_t code = 0;
    std::int64_t rank = 0;
    std::int64_t* shape = nullptr;
    std::int64_t* strides = nullptr;
    // Sparse, mkldnn and wrapping tensors have no storage of their own; a nested tensor's sizes are an error below.
    if (!has_storage_(impl(handle)) || get_device_type_(handle, &device) != 0 || device == meta_) return false;
    const bool viewed = get_dtype_(handle, &code) == 0 && get_dim_(handle, &rank) == 0 &&
                        get_sizes_(handle, &shape) == 0 && get_strides_(handle, &strides) == 0 &&
                        get_data_ptr_(handle, &tensor.data) == 0;
    if (!viewed) return false;
    tensor.shape = shape;
    tensor.strides = strides;
    facts.dtype = dtype_of_code(code);
    facts.rank = static_cast<std::int32_t>(rank);
    if (device == cpu_) {
      facts.place = {kCpuDevice, 0};
      return true;
    }
    facts.place = {kOtherDevice, 0};
    if (device != cuda_) return true;
    facts.place.type = kCudaDevice;
    return get_device_index_(handle, &facts.place.index) == 0;
  }

  // Returns a new tensor on a CPU or a GPU, to be given back to `release`; null where torch made none.
  [[nodiscard]] TensorHandle empty(DType dtype, std::int32_t rank, const std::int64_t* shape,
                                   const std::int64_t* strides, Place place) const noexcept {
    TensorHandle handle = nullptr;
    const std::int32_t code = code_of_dtype(dtype);
    const std::int32_t device = place.type == kCpuDevice ? cpu_ : cuda_;
    if (code == kNoCode || empty_strided_(rank, shape, strides, code, device, place.index, &handle) != 0) return nullptr;
    return handle;
  }

  // Whether torch's current stream on a GPU can be asked for here.
  [[nodiscard]] bool has_streams() const noexcept { return get_current_cuda_stream_ != nullptr; }
  [[nodiscard]] bool current_stream(std::int32_t device, void*& stream) const noexcept {
    return get_current_cuda_stream_(device, &stream) == 0;
  }

  [[nodiscard]] void* data(TensorHandle handle) const noexcept {
    void* data = nullptr;
    return get_data_ptr_(handle, &data) == 0 ? data : nullptr;
  }

  void release(TensorHandle handle) const noexcept { delete_tensor_(handle); }

 private:
  using Error = std::int32_t;  // 0 is success

  static constexpr std::int32_t kNoCode = -1;
  static constexpr int kNumDTypes = sizeof(kDTypes) / sizeof(kDTypes[0]);

  [[nodiscard]] static void* impl(TensorHandle handle) noexcept { return *static_cast<void**>(handle); }

  // Torch numbers dtypes and devices as it likes and exports the numbers as functions.
  [[nodiscard]] bool read_codes(const LoadedLibrary& library) noexcept {
    static constexpr const char* kNames[kNumDTypes] = {
        "aoti_torch_dtype_float32", "aoti_torch_dtype_float16",       "aoti_torch_dtype_bfloat16",
        "aoti_torch_dtype_int64",   "aoti_torch_dtype_int32",         "aoti_torch_dtype_int16",
        "aoti_torch_dtype_int8",    "aoti_torch_dtype_uint8",         "aoti_torch_dtype_bool",
        "aoti_torch_dtype_float64", "aoti_torch_dtype_float8_e4m3fn", "aoti_torch_dtype_float8_e5m2",
        "aoti_torch_dtype_float4_e2m1fn_x2"};
    const auto read = [&library](std::int32_t& code, const char* name) noexcept {
      std::int32_t (*function)() = nullptr;
      code = library.find(function, name) ? function() : kNoCode;
      return function != nullptr;
    };
    for (int i = 0; i < kNumDTypes; ++i) (void)read(codes_[i], kNames[i]);  // an unknown dtype is viewed as none
    return read(cpu_, "aoti_torch_device_type_cpu") && read(cuda_, "aoti_torch_device_type_cuda") &&
           read(meta_, "aoti_torch_device_type_meta");
  }

  [[nodiscard]] DType dtype_of_code(std::int32_t code) const noexcept {
    for (int i = 0; i < kNumDTypes; ++i) {
      if (codes_[i] == code) return kDTypes[i].dtype;
    }
    return DType{};
  }

  [[nodiscard]] std::int32_t code_of_dtype(DType dtype) const noexcept {
    for (int i = 0; i < kNumDTypes; ++i) {
      if (kDTypes[i].dtype == dtype) return codes_[i];
    }
    return kNoCode;
  }

  bool usable_ = false;
  std::int32_t codes_[kNumDTypes] = {};
  std::int32_t cpu_ = 0;
  std::int32_t cuda_ = 0;
  std::int32_t meta_ = 0;
  bool (*grad_mode_is_enabled_)() = nullptr;
  bool (*inference_mode_is_enabled_)() = nullptr;
  std::int64_t (*num_dispatch_modes_)() = nullptr;
  int (*get_num_threads_)() = nullptr;
  bool (*is_neg_)(TensorHandle) = nullptr;
  bool (*is_inference_)(TensorHandle) = nullptr;
  bool (*requires_grad_)(const void* impl) = nullptr;
  bool (*has_storage_)(const void* impl) = nullptr;
  void (*bump_version_)(TensorHandle) = nullptr;
  Error (*get_device_type_)(TensorHandle, std::int32_t*) = nullptr;
  Error (*get_device_index_)(TensorHandle, std::int32_t*) = nullptr;
  Error (*get_dtype_)(TensorHandle, std::int32_t*) = nullptr;
  Error (*get_dim_)(TensorHandle, std::int64_t*) = nullptr;
  Error (*get_sizes_)(TensorHandle, std::int64_t**) = nullptr;
  Error (*get_strides_)(TensorHandle, std::int64_t**) = nullptr;
  Error (*get_data_ptr_)(TensorHandle, void**) = nullptr;
  Error (*empty_strided_)(std::int64_t rank, const std::int64_t* shape, const std::int64_t* strides, std::int32_t dtype,
                          std::int32_t device_type, std::int32_t device_index, TensorHandle*) = nullptr;
  Error (*delete_tensor_)(TensorHandle) = nullptr;
  Error (*get_current_cuda_stream_)(std::int32_t device_index, void**) = nullptr;
};

}  // namespace fibc

#endif
