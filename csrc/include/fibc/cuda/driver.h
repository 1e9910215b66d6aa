// The CUDA driver API, as much of it as a launch needs: found with dlopen, declared here so that no CUDA header is needed.
//
// Headers in fibc/cuda are for launchers, those in fibc/cuda/runtime for modules and the harness. Launchers' have internal
// linkage and call nothing of libstdc++: each kernel's object is complete in itself, whatever it is linked with.
// tests/cpp/test_cuda_header.cpp compares the declarations with cuda.h.
#ifndef FIBC_CUDA_DRIVER_H
#define FIBC_CUDA_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#include <atomic>

namespace fibc {
namespace cuda {
namespace {

// Handles are opaque pointers in the driver's API.
using Context = void*;
using Stream = void*;
using Module = void*;
using Function = void*;
using Graph = void*;
using UserObject = void*;
using Device = int;             // CUdevice
using DevicePtr = uint64_t;     // CUdeviceptr
using Result = int;             // CUresult

enum : Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidPtx = 218,
  kUnsupportedPtxVersion = 222,
  kInvalidHandle = 400,
  kNotFound = 500,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kCooperativeLaunchTooLarge = 720,
  kNotPermitted = 800,
  kNotSupported = 801,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureImplicit = 906,
  kStreamCaptureWrongThread = 908,
  kInvalidClusterSize = 912,
  kFunctionNotLoaded = 913,
};

enum : int {  // CUdevice_attribute
  kMultiprocessorCount = 16,
  kL2CacheSize = 38,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
};

enum : int {  // CUfunction_attribute
  kMaxDynamicSharedSizeBytes = 8,
  kNonPortableClusterSizeAllowed = 14,
};

enum : int {  // CUstreamCaptureStatus
  kCaptureNone = 0,
  kCaptureActive = 1,
};

enum : int { kCaptureModeRelaxed = 2 };                   // CUstreamCaptureMode
enum : unsigned { kStreamNonBlocking = 1 };               // CUstream_flags
enum : unsigned { kUserObjectNoDestructorSync = 1 };      // CUuserObject_flags
enum : unsigned { kGraphUserObjectMove = 1 };             // CUuserObjectRetain_flags

enum : int {  // CUlaunchAttributeID
  kAttributeClusterDimension = 4,
  kAttributeProgrammaticStreamSerialization = 6,
};

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  char pad[4];
  union {
    char pad[64];
    void* aligned;  // as the driver's own, which has pointers
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic_stream_serialization;
  } value;
};

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// The functions; which of them may be null says `load`.
struct Driver {
  Result (*init)(unsigned flags);
  Result (*driver_get_version)(int*);
  Result (*get_error_name)(Result, const char**);
  Result (*get_error_string)(Result, const char**);
  Result (*device_get)(Device*, int ordinal);
  Result (*device_get_attribute)(int*, int attribute, Device);
  Result (*device_total_mem)(size_t*, Device);
  Result (*primary_ctx_retain)(Context*, Device);
  Result (*ctx_get_current)(Context*);
  Result (*ctx_get_device)(Device*);
  Result (*ctx_push_current)(Context);
  Result (*ctx_pop_current)(Context*);
  Result (*module_load_data)(Module*, const void* image);
  Result (*module_unload)(Module);
  Result (*module_get_function)(Function*, Module, const char* name);
  Result (*func_set_attribute)(Function, int attribute, int value);
  Result (*launch_kernel_ex)(const LaunchConfig*, Function, void** parameters, void** extra);
  Result (*stream_is_capturing)(Stream, int* status);
  Result (*stream_create)(Stream*, unsigned flags);
  Result (*stream_synchronize)(Stream);
  Result (*stream_query)(Stream);
  Result (*thread_exchange_capture_mode)(int* mode);
  Result (*mem_alloc)(DevicePtr*, size_t);
  Result (*memset_async)(DevicePtr, unsigned char, size_t, Stream);
  // From here on null in older drivers.
  Result (*func_load)(Function);                          // 12.4
  Result (*stream_get_id)(Stream, unsigned long long*);   // 12.0
  Result (*stream_get_capture_info)(Stream, int* status, uint64_t* id, Graph*, const void** dependencies,
                                    size_t* num_dependencies);  // 11.3
  Result (*user_object_create)(UserObject*, void* pointer, void (*destroy)(void*), unsigned count, unsigned flags);
  Result (*graph_retain_user_object)(Graph, UserObject, unsigned count, unsigned flags);
  Result (*tensor_map_encode_tiled)(void* map, int dtype, uint32_t rank, void* data, const uint64_t* shape,
                                    const uint64_t* strides_bytes, const uint32_t* box, const uint32_t* element_strides,
                                    int interleave, int swizzle, int l2_promotion, int fill);  // 12.0
};

template <class Function>
inline bool find_function(void* library, Function*& function, const char* name) noexcept {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

// Reads the functions from an open library; false where one that every call needs is missing.
[[nodiscard]] inline bool load(Driver& driver, void* library) noexcept {
  const auto find = [library](auto& function, const char* name) noexcept {
    return find_function(library, function, name);
  };
  (void)find(driver.func_load, "cuFuncLoad");
  (void)find(driver.stream_get_id, "cuStreamGetId");
  (void)find(driver.stream_get_capture_info, "cuStreamGetCaptureInfo_v2");
  (void)find(driver.user_object_create, "cuUserObjectCreate");
  (void)find(driver.graph_retain_user_object, "cuGraphRetainUserObject");
  (void)find(driver.tensor_map_encode_tiled, "cuTensorMapEncodeTiled");
  return find(driver.init, "cuInit") && find(driver.driver_get_version, "cuDriverGetVersion") &&
         find(driver.get_error_name, "cuGetErrorName") && find(driver.get_error_string, "cuGetErrorString") &&
         find(driver.device_get, "cuDeviceGet") && find(driver.device_get_attribute, "cuDeviceGetAttribute") &&
         find(driver.device_total_mem, "cuDeviceTotalMem_v2") &&
         find(driver.primary_ctx_retain, "cuDevicePrimaryCtxRetain") &&
         find(driver.ctx_get_current, "cuCtxGetCurrent") && find(driver.ctx_get_device, "cuCtxGetDevice") &&
         find(driver.ctx_push_current, "cuCtxPushCurrent_v2") && find(driver.ctx_pop_current, "cuCtxPopCurrent_v2") &&
         find(driver.module_load_data, "cuModuleLoadData") && find(driver.module_unload, "cuModuleUnload") &&
         find(driver.module_get_function, "cuModuleGetFunction") &&
         find(driver.func_set_attribute, "cuFuncSetAttribute") &&
         find(driver.launch_kernel_ex, "cuLaunchKernelEx") && find(driver.stream_is_capturing, "cuStreamIsCapturing") &&
         find(driver.stream_create, "cuStreamCreate") && find(driver.stream_synchronize, "cuStreamSynchronize") &&
         find(driver.stream_query, "cuStreamQuery") &&
         find(driver.thread_exchange_capture_mode, "cuThreadExchangeStreamCaptureMode") &&
         find(driver.mem_alloc, "cuMemAlloc_v2") && find(driver.memset_async, "cuMemsetD8Async");
}

enum class Search : int { kNotBegun, kUnderWay, kDone };

struct DriverSlot {
  Driver functions;
  const Driver* found;  // null until it is known to be complete
  std::atomic<Search> search;
};
inline DriverSlot driver_slot = {};

// The driver of this process; null where there is none, or one that is too old. Looks once; initialises nothing.
[[nodiscard]] inline const Driver* driver() noexcept {
  while (driver_slot.search.load(std::memory_order_acquire) != Search::kDone) {
    Search begun = Search::kNotBegun;
    if (!driver_slot.search.compare_exchange_strong(begun, Search::kUnderWay)) continue;
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library != nullptr && load(driver_slot.functions, library)) driver_slot.found = &driver_slot.functions;
    driver_slot.search.store(Search::kDone, std::memory_order_release);
  }
  return driver_slot.found;
}

// Puts another table in the driver's place, null for none; for tests.
inline void set_driver(const Driver* table) noexcept {
  driver_slot.found = table;
  driver_slot.search.store(Search::kDone, std::memory_order_release);
}

// Whether the driver refused a call and did nothing. Every other error is taken for one of the device: it is raised, and
// a wrong guess costs one exception, where the other wrong guess would hide a fault.
[[nodiscard]] inline bool is_refusal(Result result) noexcept {
  switch (result) {
    case kInvalidValue:
    case kOutOfMemory:
    case kNotInitialized:
    case kNoDevice:
    case kInvalidDevice:
    case kInvalidImage:
    case kInvalidContext:
    case kNoBinaryForGpu:
    case kInvalidPtx:
    case kUnsupportedPtxVersion:
    case kInvalidHandle:
    case kNotFound:
    case kLaunchOutOfResources:
    case kCooperativeLaunchTooLarge:
    case kNotPermitted:
    case kNotSupported:
    case kInvalidClusterSize:
    case kFunctionNotLoaded:
      return true;
    default:
      return kStreamCaptureUnsupported <= result && result <= kStreamCaptureWrongThread;
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fibc

#endif
