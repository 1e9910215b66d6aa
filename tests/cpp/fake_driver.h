// A CUDA driver made of plain memory: counts what is asked of it, answers as a test wants.
#ifndef FIBC_TESTS_FAKE_DRIVER_H
#define FIBC_TESTS_FAKE_DRIVER_H

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fibc/cuda/driver.h"
#include "fibc/silicon.h"

namespace fibc_tests {
namespace {

namespace cuda = fibc::cuda;

constexpr fibc::Silicon kH200 = {90, 132, 60 << 20, std::int64_t{139} << 30};

struct FakeGpu {
  fibc::Silicon silicon = kH200;
  int num_retained = 0;
  int num_loaded = 0;  // modules
  char context = 0;    // its address is the primary context
};

struct RecordedLaunch {
  cuda::LaunchConfig config;
  std::vector<cuda::LaunchAttribute> attributes;
  cuda::Function function;
  std::vector<void*> parameters;
};

struct RecordedMemset {
  cuda::DevicePtr address;
  std::size_t bytes;
  cuda::Stream stream;
};

struct UserObject {
  void* pointer;
  void (*destroy)(void*);
};

// One at a time; `install()` puts it in the driver's place.
class FakeDriver {
 public:
  std::vector<FakeGpu> gpus = std::vector<FakeGpu>(2);
  std::vector<cuda::Context> stack;  // of the calling thread; the last is current
  cuda::Result load_result = cuda::kSuccess;
  cuda::Result launch_result = cuda::kSuccess;
  cuda::Result encode_result = cuda::kSuccess;
  cuda::Result query_result = cuda::kSuccess;
  std::map<cuda::Stream, std::uint64_t> captures;  // of streams that are captured
  std::map<std::uint64_t, std::vector<UserObject>> graphs;
  std::vector<RecordedLaunch> launches;
  std::vector<RecordedMemset> memsets;
  std::vector<std::pair<int, int>> function_attributes;  // attribute, value
  std::vector<std::string> function_names;
  int capture_mode = 0;  // global
  int num_encoded = 0;
  int num_allocated = 0;
  int num_functions_loaded = 0;

  FakeDriver() { now() = this; }
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  cuda::Context context(int gpu) { return &gpus[static_cast<std::size_t>(gpu)].context; }
  void make_current(int gpu) { stack.assign(1, context(gpu)); }
  [[nodiscard]] cuda::Context current() const { return stack.empty() ? nullptr : stack.back(); }

  int gpu_of(cuda::Context context) {
    for (std::size_t i = 0; i < gpus.size(); ++i) {
      if (context == &gpus[i].context || context == foreign_context(static_cast<int>(i))) return static_cast<int>(i);
    }
    return -1;
  }
  // Another context than the primary one on a GPU.
  static cuda::Context foreign_context(int gpu) {
    static char contexts[8];
    return contexts + gpu;
  }

  // Ends a graph and what was instantiated from it.
  void destroy_graph(std::uint64_t id) {
    for (const UserObject& object : graphs[id]) object.destroy(object.pointer);
    graphs.erase(id);
  }

  [[nodiscard]] const cuda::Driver& table() const { return table_; }
  cuda::Driver& table() { return table_; }
  void install() { cuda::set_driver(&table_); }

 private:
  static FakeDriver*& now() {
    static FakeDriver* driver = nullptr;
    return driver;
  }

  static cuda::Driver make_table() {
    cuda::Driver t = {};
    t.init = [](unsigned) { return cuda::Result{cuda::kSuccess}; };
    t.driver_get_version = [](int* version) {
      *version = 13000;
      return cuda::Result{cuda::kSuccess};
    };
    t.get_error_name = [](cuda::Result, const char** text) {
      *text = "CUDA_ERROR_FAKE";
      return cuda::Result{cuda::kSuccess};
    };
    t.get_error_string = t.get_error_name;
    t.device_get = [](cuda::Device* device, int ordinal) {
      *device = ordinal;
      const bool known = 0 <= ordinal && ordinal < static_cast<int>(now()->gpus.size());
      return cuda::Result{known ? cuda::kSuccess : cuda::kInvalidDevice};
    };
    t.device_get_attribute = [](int* value, int attribute, cuda::Device device) {
      const fibc::Silicon& silicon = now()->gpus[static_cast<std::size_t>(device)].silicon;
      switch (attribute) {
        case cuda::kComputeCapabilityMajor: *value = silicon.compute_capability / 10; break;
        case cuda::kComputeCapabilityMinor: *value = silicon.compute_capability % 10; break;
        case cuda::kMultiprocessorCount: *value = silicon.num_sms; break;
        case cuda::kL2CacheSize: *value = static_cast<int>(silicon.l2_bytes); break;
        default: return cuda::Result{cuda::kInvalidValue};
      }
      return cuda::Result{cuda::kSuccess};
    };
    t.device_total_mem = [](size_t* bytes, cuda::Device device) {
      *bytes = static_cast<size_t>(now()->gpus[static_cast<std::size_t>(device)].silicon.memory_bytes);
      return cuda::Result{cuda::kSuccess};
    };
    t.primary_ctx_retain = [](cuda::Context* context, cuda::Device device) {
      ++now()->gpus[static_cast<std::size_t>(device)].num_retained;
      *context = now()->context(device);
      return cuda::Result{cuda::kSuccess};
    };
    t.ctx_get_current = [](cuda::Context* context) {
      *context = now()->current();
      return cuda::Result{cuda::kSuccess};
    };
    t.ctx_get_device = [](cuda::Device* device) {
      *device = now()->gpu_of(now()->current());
      return cuda::Result{*device < 0 ? cuda::kInvalidContext : cuda::kSuccess};
    };
    t.ctx_push_current = [](cuda::Context context) {
      now()->stack.push_back(context);
      return cuda::Result{cuda::kSuccess};
    };
    t.ctx_pop_current = [](cuda::Context* context) {
      *context = now()->current();
      now()->stack.pop_back();
      return cuda::Result{cuda::kSuccess};
    };
    t.module_load_data = [](cuda::Module* module, const void* image) {
      if (now()->load_result != cuda::kSuccess) return now()->load_result;
      const int gpu = now()->gpu_of(now()->current());
      if (gpu < 0) return cuda::Result{cuda::kInvalidContext};
      ++now()->gpus[static_cast<std::size_t>(gpu)].num_loaded;
      *module = const_cast<void*>(image);
      return cuda::Result{cuda::kSuccess};
    };
    t.module_unload = [](cuda::Module) {
      --now()->gpus[static_cast<std::size_t>(now()->gpu_of(now()->current()))].num_loaded;
      return cuda::Result{cuda::kSuccess};
    };
    t.module_get_function = [](cuda::Function* function, cuda::Module module, const char* name) {
      if (std::strcmp(name, "missing") == 0) return cuda::Result{cuda::kNotFound};
      now()->function_names.emplace_back(name);
      *function = static_cast<char*>(module) + now()->gpu_of(now()->current());
      return cuda::Result{cuda::kSuccess};
    };
    t.func_set_attribute = [](cuda::Function, int attribute, int value) {
      now()->function_attributes.emplace_back(attribute, value);
      return cuda::Result{cuda::kSuccess};
    };
    t.func_load = [](cuda::Function) {
      ++now()->num_functions_loaded;
      return cuda::Result{cuda::kSuccess};
    };
    t.launch_kernel_ex = [](const cuda::LaunchConfig* config, cuda::Function function, void** parameters, void**) {
      if (now()->launch_result != cuda::kSuccess) return now()->launch_result;
      now()->launches.push_back({*config,
                                 {config->attributes, config->attributes + config->num_attributes},
                                 function,
                                 std::vector<void*>(parameters, parameters + 2)});
      return cuda::Result{cuda::kSuccess};
    };
    t.stream_is_capturing = [](cuda::Stream stream, int* status) {
      *status = now()->captures.count(stream) != 0 ? cuda::kCaptureActive : cuda::kCaptureNone;
      return cuda::Result{cuda::kSuccess};
    };
    t.stream_get_capture_info = [](cuda::Stream stream, int* status, std::uint64_t* id, cuda::Graph* graph, const void**,
                                   size_t*) {
      const auto found = now()->captures.find(stream);
      if (found == now()->captures.end()) return cuda::Result{cuda::kInvalidValue};
      *status = cuda::kCaptureActive;
      *id = found->second;
      *graph = reinterpret_cast<cuda::Graph>(found->second);
      return cuda::Result{cuda::kSuccess};
    };
    t.stream_create = [](cuda::Stream* stream, unsigned) {
      *stream = reinterpret_cast<cuda::Stream>(0xfff0);
      return cuda::Result{cuda::kSuccess};
    };
    t.stream_synchronize = [](cuda::Stream) { return cuda::Result{cuda::kSuccess}; };
    t.stream_query = [](cuda::Stream) { return now()->query_result; };
    t.stream_get_id = [](cuda::Stream stream, unsigned long long* id) {
      *id = reinterpret_cast<unsigned long long>(stream) + 1000;
      return cuda::Result{cuda::kSuccess};
    };
    t.thread_exchange_capture_mode = [](int* mode) {
      std::swap(*mode, now()->capture_mode);
      return cuda::Result{cuda::kSuccess};
    };
    t.mem_alloc = [](cuda::DevicePtr* address, size_t) {
      // The driver spoils a capture that a thread in another mode allocates beside.
      if (now()->capture_mode != cuda::kCaptureModeRelaxed && !now()->captures.empty()) {
        return cuda::Result{cuda::kStreamCaptureUnsupported};
      }
      *address = 0x100000000u * static_cast<unsigned>(++now()->num_allocated);
      return cuda::Result{cuda::kSuccess};
    };
    t.memset_async = [](cuda::DevicePtr address, unsigned char, size_t bytes, cuda::Stream stream) {
      now()->memsets.push_back({address, bytes, stream});
      return cuda::Result{cuda::kSuccess};
    };
    t.user_object_create = [](cuda::UserObject* object, void* pointer, void (*destroy)(void*), unsigned, unsigned) {
      *object = new UserObject{pointer, destroy};
      return cuda::Result{cuda::kSuccess};
    };
    t.graph_retain_user_object = [](cuda::Graph graph, cuda::UserObject object, unsigned, unsigned) {
      auto* taken = static_cast<UserObject*>(object);
      now()->graphs[reinterpret_cast<std::uint64_t>(graph)].push_back(*taken);
      delete taken;
      return cuda::Result{cuda::kSuccess};
    };
    t.tensor_map_encode_tiled = [](void* map, int dtype, std::uint32_t rank, void* data, const std::uint64_t* shape,
                                   const std::uint64_t* strides_bytes, const std::uint32_t* box, const std::uint32_t*, int,
                                   int swizzle, int, int) {
      ++now()->num_encoded;
      if (now()->encode_result != cuda::kSuccess) return now()->encode_result;
      std::uint64_t words[16] = {};  // what went in, for the test to read
      words[0] = static_cast<std::uint64_t>(dtype);
      words[1] = rank;
      words[2] = reinterpret_cast<std::uint64_t>(data);
      for (std::uint32_t d = 0; d < rank; ++d) {
        words[3 + d] = shape[d];
        words[8 + d] = box[d];
      }
      words[13] = strides_bytes[0];
      words[14] = static_cast<std::uint64_t>(swizzle);
      std::memcpy(map, words, sizeof words);
      return cuda::Result{cuda::kSuccess};
    };
    return t;
  }

  cuda::Driver table_ = make_table();
};

}  // namespace
}  // namespace fibc_tests

#endif
