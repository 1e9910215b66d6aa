// The driver API as it is declared here is the one that cuda.h declares, wherever there is a cuda.h.
#include "fibc/cuda/driver.h"
#include "fibc/cuda/tensor_map.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

#include <cstddef>
#include <type_traits>
#include <utility>

namespace {

using namespace fibc::cuda;

#define FIBC_SAME(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs), #theirs)
FIBC_SAME(kSuccess, CUDA_SUCCESS);
FIBC_SAME(kInvalidValue, CUDA_ERROR_INVALID_VALUE);
FIBC_SAME(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
FIBC_SAME(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
FIBC_SAME(kNoDevice, CUDA_ERROR_NO_DEVICE);
FIBC_SAME(kInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
FIBC_SAME(kInvalidImage, CUDA_ERROR_INVALID_IMAGE);
FIBC_SAME(kInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
FIBC_SAME(kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
FIBC_SAME(kInvalidPtx, CUDA_ERROR_INVALID_PTX);
FIBC_SAME(kUnsupportedPtxVersion, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
FIBC_SAME(kInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
FIBC_SAME(kNotFound, CUDA_ERROR_NOT_FOUND);
FIBC_SAME(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
FIBC_SAME(kLaunchOutOfResources, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
FIBC_SAME(kCooperativeLaunchTooLarge, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
FIBC_SAME(kNotPermitted, CUDA_ERROR_NOT_PERMITTED);
FIBC_SAME(kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
FIBC_SAME(kStreamCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
FIBC_SAME(kStreamCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
FIBC_SAME(kStreamCaptureWrongThread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
FIBC_SAME(kInvalidClusterSize, CUDA_ERROR_INVALID_CLUSTER_SIZE);
FIBC_SAME(kFunctionNotLoaded, CUDA_ERROR_FUNCTION_NOT_LOADED);
FIBC_SAME(kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
FIBC_SAME(kL2CacheSize, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
FIBC_SAME(kComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
FIBC_SAME(kComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
FIBC_SAME(kMaxDynamicSharedSizeBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
FIBC_SAME(kNonPortableClusterSizeAllowed, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
FIBC_SAME(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);
FIBC_SAME(kCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE);
FIBC_SAME(kCaptureModeRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
FIBC_SAME(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
FIBC_SAME(kUserObjectNoDestructorSync, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
FIBC_SAME(kGraphUserObjectMove, CU_GRAPH_USER_OBJECT_MOVE);
FIBC_SAME(kAttributeClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
FIBC_SAME(kAttributeProgrammaticStreamSerialization, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);

static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute) && alignof(LaunchAttribute) == alignof(CUlaunchAttribute));
static_assert(offsetof(LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(offsetof(LaunchAttribute, id) == offsetof(CUlaunchAttribute, id));
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(LaunchConfig, block_x) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(LaunchConfig, shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(LaunchConfig, num_attributes) == offsetof(CUlaunchConfig, numAttrs));

static_assert(sizeof(Device) == sizeof(CUdevice) && sizeof(DevicePtr) == sizeof(CUdeviceptr));
static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));
FIBC_SAME(TensorMapType::kUint8, CU_TENSOR_MAP_DATA_TYPE_UINT8);
FIBC_SAME(TensorMapType::kInt64, CU_TENSOR_MAP_DATA_TYPE_INT64);
FIBC_SAME(TensorMapType::kFloat16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
FIBC_SAME(TensorMapType::kFloat32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
FIBC_SAME(TensorMapType::kBfloat16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
FIBC_SAME(TensorMapType::kTfloat32Ftz, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ);
FIBC_SAME(Swizzle::k32Bytes, CU_TENSOR_MAP_SWIZZLE_32B);
FIBC_SAME(Swizzle::k128Bytes, CU_TENSOR_MAP_SWIZZLE_128B);
FIBC_SAME(L2Promotion::k128Bytes, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
FIBC_SAME(Fill::kNanRequestZeroFma, CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA);

// Parameters agree in number, and each in size: an enumeration is an int, a handle a pointer.
template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class... Ours, class... Theirs>
struct Alike<Result (*)(Ours...), CUresult(Theirs...)>
    : std::bool_constant<sizeof...(Ours) == sizeof...(Theirs) &&
                         std::is_same_v<std::integer_sequence<std::size_t, sizeof(Ours)...>,
                                        std::integer_sequence<std::size_t, sizeof(Theirs)...>>> {};

#define FIBC_ALIKE(ours, theirs) static_assert(Alike<decltype(Driver::ours), decltype(theirs)>::value, #theirs)
FIBC_ALIKE(init, cuInit);
FIBC_ALIKE(driver_get_version, cuDriverGetVersion);
FIBC_ALIKE(get_error_name, cuGetErrorName);
FIBC_ALIKE(get_error_string, cuGetErrorString);
FIBC_ALIKE(device_get, cuDeviceGet);
FIBC_ALIKE(device_get_attribute, cuDeviceGetAttribute);
FIBC_ALIKE(device_total_mem, cuDeviceTotalMem);
FIBC_ALIKE(primary_ctx_retain, cuDevicePrimaryCtxRetain);
FIBC_ALIKE(ctx_get_current, cuCtxGetCurrent);
FIBC_ALIKE(ctx_get_device, cuCtxGetDevice);
FIBC_ALIKE(ctx_push_current, cuCtxPushCurrent);
FIBC_ALIKE(ctx_pop_current, cuCtxPopCurrent);
FIBC_ALIKE(module_load_data, cuModuleLoadData);
FIBC_ALIKE(module_unload, cuModuleUnload);
FIBC_ALIKE(module_get_function, cuModuleGetFunction);
FIBC_ALIKE(func_set_attribute, cuFuncSetAttribute);
FIBC_ALIKE(launch_kernel_ex, cuLaunchKernelEx);
FIBC_ALIKE(stream_is_capturing, cuStreamIsCapturing);
FIBC_ALIKE(stream_create, cuStreamCreate);
FIBC_ALIKE(stream_synchronize, cuStreamSynchronize);
FIBC_ALIKE(stream_query, cuStreamQuery);
FIBC_ALIKE(thread_exchange_capture_mode, cuThreadExchangeStreamCaptureMode);
FIBC_ALIKE(mem_alloc, cuMemAlloc);
FIBC_ALIKE(memset_async, cuMemsetD8Async);
FIBC_ALIKE(func_load, cuFuncLoad);
FIBC_ALIKE(stream_get_id, cuStreamGetId);
FIBC_ALIKE(user_object_create, cuUserObjectCreate);
FIBC_ALIKE(graph_retain_user_object, cuGraphRetainUserObject);
FIBC_ALIKE(tensor_map_encode_tiled, cuTensorMapEncodeTiled);

}  // namespace
#endif

int main() { return 0; }
