// A libcuda.so.1 without a GPU behind it, for processes of tests. FAKE_GPUS: "compute_capability,num_sms,l2_bytes,
// memory_bytes" of each GPU, separated by ";". FAKE_LOAD: the result of loading code. FAKE_PARAMETERS: sizes of a kernel's
// parameters, which launches then print in hexadecimal, separated by ",". The variables `fake_*` may be written at any time. What would change something prints itself and is not done.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define FAKE(name, ...) extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)

#include "fibc/cuda/driver.h"

extern "C" {
__attribute__((visibility("default"))) int fake_launch_result = 0;
__attribute__((visibility("default"))) int fake_query_result = 0;
__attribute__((visibility("default"))) unsigned long long fake_capture = 0;  // id of what every stream captures, or 0
}

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidDevice = 101;

struct Silicon {
  long long values[4];
};

// False where there is no such GPU.
bool silicon_of(int gpu, Silicon& out) {
  const char* text = std::getenv("FAKE_GPUS");
  for (int i = 0; text != nullptr && i < gpu; ++i) {
    text = std::strchr(text, ';');
    if (text != nullptr) ++text;
  }
  return text != nullptr && std::sscanf(text, "%lld,%lld,%lld,%lld", out.values, out.values + 1, out.values + 2,
                                        out.values + 3) == 4;
}

char contexts[8];
void* stack[8];
int depth = 0;

}  // namespace

// Lines appear among the script's own.
__attribute__((constructor)) static void begin() { std::setvbuf(stdout, nullptr, _IOLBF, 0); }

extern "C" __attribute__((visibility("default"))) void fake_make_current(int gpu) { stack[depth++] = contexts + gpu; }

FAKE(cuInit, unsigned) {
  std::puts("init");
  return kSuccess;
}
FAKE(cuDriverGetVersion, int* version) {
  *version = 12080;
  return kSuccess;
}
FAKE(cuGetErrorName, int error, const char** text) {
  static char name[32];
  std::snprintf(name, sizeof name, "CUDA_ERROR_%d", error);
  *text = name;
  return kSuccess;
}
FAKE(cuGetErrorString, int error, const char** text) { return cuGetErrorName(error, text); }
FAKE(cuDeviceGet, int* device, int ordinal) {
  Silicon silicon;
  *device = ordinal;
  return silicon_of(ordinal, silicon) ? kSuccess : kInvalidDevice;
}
FAKE(cuDeviceGetAttribute, int* value, int attribute, int device) {
  Silicon silicon;
  if (!silicon_of(device, silicon)) return kInvalidDevice;
  const long long capability = silicon.values[0];
  *value = static_cast<int>(attribute == 75   ? capability / 10
                            : attribute == 76 ? capability % 10
                            : attribute == 16 ? silicon.values[1]
                                              : silicon.values[2]);
  return kSuccess;
}
FAKE(cuDeviceTotalMem_v2, std::size_t* bytes, int device) {
  Silicon silicon;
  if (!silicon_of(device, silicon)) return kInvalidDevice;
  *bytes = static_cast<std::size_t>(silicon.values[3]);
  return kSuccess;
}
FAKE(cuDevicePrimaryCtxRetain, void** context, int device) {
  std::printf("retain %d\n", device);
  *context = contexts + device;
  return kSuccess;
}
FAKE(cuCtxGetCurrent, void** context) {
  *context = depth == 0 ? nullptr : stack[depth - 1];
  return kSuccess;
}
FAKE(cuCtxGetDevice, int* device) {
  *device = static_cast<int>(static_cast<char*>(stack[depth - 1]) - contexts);
  return kSuccess;
}
FAKE(cuCtxPushCurrent_v2, void* context) {
  stack[depth++] = context;
  return kSuccess;
}
FAKE(cuCtxPopCurrent_v2, void** context) {
  *context = stack[--depth];
  return kSuccess;
}
FAKE(cuModuleLoadData, void** module, const void* image) {
  const char* result = std::getenv("FAKE_LOAD");
  std::printf("load on %d\n", static_cast<int>(static_cast<char*>(stack[depth - 1]) - contexts));
  *module = const_cast<void*>(image);
  return result == nullptr ? kSuccess : std::atoi(result);
}
FAKE(cuModuleUnload, void*) { return kSuccess; }
FAKE(cuModuleGetFunction, void** function, void* module, const char*) {
  *function = module;
  return kSuccess;
}
FAKE(cuFuncSetAttribute, void*, int attribute, int value) {
  std::printf("attribute %d %d\n", attribute, value);
  return kSuccess;
}
FAKE(cuTensorMapEncodeTiled, void* map, int dtype, std::uint32_t rank, void* data, const std::uint64_t* shape,
     const std::uint64_t* strides_bytes, const std::uint32_t* box, const std::uint32_t*, int, int swizzle, int promotion, int) {
  std::printf("map of %p, dtype %d, swizzle %d, promotion %d:", data, dtype, swizzle, promotion);
  for (std::uint32_t d = 0; d < rank; ++d) {
    std::printf(" %llu/%u", static_cast<unsigned long long>(shape[d]), box[d]);
    if (d > 0) std::printf(" by %llu", static_cast<unsigned long long>(strides_bytes[d - 1]));
  }
  std::puts("");
  std::memset(map, dtype, 128);
  return kSuccess;
}

namespace {

void print_parameters(void** parameters) {
  const char* sizes = std::getenv("FAKE_PARAMETERS");
  for (int i = 0; sizes != nullptr; ++i) {
    const int size = std::atoi(sizes);
    std::printf(i == 0 ? "parameters " : " ");
    for (int byte = size - 1; byte >= 0; --byte) std::printf("%02x", static_cast<unsigned char*>(parameters[i])[byte]);
    sizes = std::strchr(sizes, ',');
    if (sizes != nullptr) ++sizes;
    if (sizes == nullptr) std::puts("");
  }
}

}  // namespace

FAKE(cuLaunchKernelEx, const fibc::cuda::LaunchConfig* config, void*, void** parameters, void**) {
  print_parameters(parameters);
  std::printf("launch %u %u %u x %u, shared %u, stream %d, gpu %d", config->grid_x, config->grid_y, config->grid_z,
              config->block_x, config->shared_bytes, static_cast<int>(reinterpret_cast<std::intptr_t>(config->stream)),
              static_cast<int>(static_cast<char*>(stack[depth - 1]) - contexts));
  for (unsigned i = 0; i < config->num_attributes; ++i) std::printf(", attribute %d", config->attributes[i].id);
  std::puts("");
  return fake_launch_result;
}
FAKE(cuStreamIsCapturing, void*, int* status) {
  *status = fake_capture != 0 ? 1 : 0;
  return kSuccess;
}
FAKE(cuStreamGetCaptureInfo_v2, void*, int* status, std::uint64_t* id, void** graph, const void**, std::size_t*) {
  *status = 1;
  *id = fake_capture;
  *graph = contexts;
  return kSuccess;
}
FAKE(cuUserObjectCreate, void** object, void*, void (*)(void*), unsigned, unsigned) {
  *object = contexts;
  return kSuccess;
}
FAKE(cuGraphRetainUserObject, void*, void*, unsigned, unsigned) {
  std::puts("retain counters");
  return kSuccess;
}
FAKE(cuStreamCreate, void** stream, unsigned) {
  *stream = contexts;
  return kSuccess;
}
FAKE(cuStreamSynchronize, void*) { return kSuccess; }
FAKE(cuStreamQuery, void*) { return fake_query_result; }
FAKE(cuThreadExchangeStreamCaptureMode, int*) { return kSuccess; }
FAKE(cuMemAlloc_v2, std::uint64_t* address, std::size_t bytes) {
  std::printf("allocate %zu\n", bytes);
  *address = std::uint64_t{1} << 46;
  return kSuccess;
}
FAKE(cuMemsetD8Async, std::uint64_t, unsigned char, std::size_t bytes, void*) {
  std::printf("memset %zu\n", bytes);
  return kSuccess;
}
