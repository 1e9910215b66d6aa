// The entry that every generated module shares, compiled once; the table comes from the module's own translation unit.
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstddef>
#include <string>

#include "fibc/cuda/cublaslt.h"
#include "fibc/dispatch.h"
#include "fibc/entry/arguments.h"
#include "fibc/entry/cuda_calls.h"
#include "fibc/entry/outputs.h"
#include "fibc/entry/ref.h"
#include "fibc/entry/tensor_adapter.h"
#include "fibc/openmp.h"
#include "fibc/parallel.h"
#include "fibc/stats.h"
#include "fibc/table.h"

namespace py = pybind11;

namespace fibc {
namespace {

constexpr const Table& kTable = fibc_module_table;
constexpr const Spec& kSpec = fibc_module_table.spec;

// Everything that outlives a call. Never freed: at exit, Python ends before static objects do.
struct Module {
  TensorAdapter adapter;
  Host host = Host::detect();
  CudaCalls cuda;
  bool accept_gpu = false;
  Ref on_device;  // called with a GPU's index when its state has become known
  Stats stats{kTable.variants.size};
  Reason standing = Reason::kHit;  // what speaks against every call, found when the module is imported
  std::atomic<bool> enabled{true};
  Ref native;
  Ref native_out;
};

Module* module = nullptr;

[[nodiscard]] PyObject* call_native(Reason reason, const Ref& native, PyObject* const* args, std::int32_t num_args) {
  module->stats.count(reason);
  if (!native) {
    PyErr_Format(PyExc_RuntimeError, "%s: no native kernel is set (use set_native)", kSpec.definition);
    return nullptr;
  }
  const Ref held = Ref::borrow(native.get());  // another thread may set another one meanwhile
  return PyObject_Vectorcall(held.get(), args, static_cast<std::size_t>(num_args), nullptr);
}

// What can be said before a look at the arguments. Sets the call's threads.
[[nodiscard]] Reason check_surroundings(Call& call) {
  if (!module->enabled.load(std::memory_order_relaxed)) return Reason::kDisabled;
  if (module->standing != Reason::kHit) return module->standing;
  call.num_threads = 1;
  if (kTable.target == Target::kCpu) {
    const std::int32_t num_threads = module->adapter.num_threads();
    if (num_threads != kTable.cpu.num_threads) return Reason::kNumThreads;
    call.num_threads = usable_threads(num_threads);
  }
  return module->adapter.is_watched() ? Reason::kMode : Reason::kHit;
}

[[nodiscard]] Choice choose_for(PyObject* const* args, bool grad_mode, Call& call) {
  if (const Reason reason = check_surroundings(call); reason != Reason::kHit) return {reason, kNoRegion};
  const Reason reason = read_inputs(module->adapter, kSpec, args, grad_mode, call);
  if (reason != Reason::kHit) return {reason, kNoRegion};
  Choice choice = choose(kTable, module->host.isa, call);
  if (choice.reason == Reason::kHit && kTable.target == Target::kCuda) {
    choice.reason = module->cuda.state(call.place.index, kTable.regions[choice.region].variant);
  }
  return choice;
}

// Tells Python that the state of GPU `index` has changed; false with a Python error set.
[[nodiscard]] bool tell(std::int32_t index) {
  return !module->on_device || static_cast<bool>(Ref(PyObject_CallFunction(module->on_device.get(), "i", index)));
}

[[nodiscard]] Reason raise_device_error(std::int32_t index) {
  if (!tell(index)) return Reason::kDeviceError;
  const std::int32_t variant = module->cuda.devices()[index].variant;
  module->cuda.raise_error(kSpec.definition, variant < 0 ? "loading" : kTable.variants[variant].symbol, index);
  return Reason::kDeviceError;
}

// Prepares GPU `index` and returns its state, which is told to Python once; kDeviceError with a Python error set.
[[nodiscard]] Reason prepare(std::int32_t index) {
  if (const Reason now = module->cuda.state(index); now != Reason::kUnprepared) return now;
  const Reason reason = module->cuda.prepare(module->adapter, index, &kTable.cuda, module->accept_gpu, kTable.variants);
  if (reason == Reason::kUnprepared || reason == Reason::kContext) return reason;
  if (reason == Reason::kDeviceError) return raise_device_error(index);
  return tell(index) ? reason : Reason::kDeviceError;  // a warning that the user has made an error
}

[[nodiscard]] Choice choose_and_prepare(PyObject* const* args, bool grad_mode, Call& call) {
  Choice choice = choose_for(args, grad_mode, call);
  if (choice.reason != Reason::kUnprepared) return choice;
  choice.reason = prepare(call.place.index);
  if (choice.reason == Reason::kHit) {
    choice.reason = module->cuda.state(call.place.index, kTable.regions[choice.region].variant);
  }
  return choice;
}

[[nodiscard]] Reason serve_on_cpu(const Region& served, const Call& call) {
  const fibc_kernel entry = kTable.variants[served.variant].entry;
  if (!served.release_gil) return launch(entry, call, parallel) == FIBC_OK ? Reason::kHit : Reason::kKernel;
  PyThreadState* state = PyEval_SaveThread();
  const std::int32_t status = launch(entry, call, parallel);
  PyEval_RestoreThread(state);
  return status == FIBC_OK ? Reason::kHit : Reason::kKernel;
}

// Runs the region's variant on a call whose guards have passed; kDeviceError with a Python error set.
[[nodiscard]] Reason serve(std::int32_t region, const Call& call) {
  const Region& served = kTable.regions[region];
  const Reason reason =
      kTable.target == Target::kCpu
          ? serve_on_cpu(served, call)
          : module->cuda.launch(module->adapter, kTable.variants[served.variant], served.variant, call);
  if (reason == Reason::kHit) module->stats.count_hit(served.variant);
  return reason == Reason::kDeviceError ? raise_device_error(call.place.index) : reason;
}

[[nodiscard]] std::nullptr_t fail(Reason reason) {
  module->stats.count(reason);
  return nullptr;
}

PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  PyObject* scratch[kMaxTensors];
  args = bind_arguments({"run", &kSpec, false}, args, num_args, keywords, scratch);
  if (args == nullptr) return nullptr;
  Call call;
  const bool grad_mode = module->standing == Reason::kHit && module->adapter.grad_mode();
  const auto [found, region] = choose_and_prepare(args, grad_mode, call);
  Reason reason = found;
  if (reason == Reason::kHit || reason == Reason::kEmpty) {
    Outputs outputs(kSpec);
    for (std::int32_t i = 0; i < kSpec.outputs.size; ++i) {
      Reason made = outputs.make(module->adapter, args, call, i);
      if (made == Reason::kHit && reason == Reason::kHit) {
        made = check_output(kTable, region, call, i, kSpec.outputs[i].alias != kNoAlias);
      }
      if (made != Reason::kHit) return call_native(made, module->native, args, kSpec.inputs.size);
    }
    if (reason == Reason::kHit) reason = serve(region, call);
    if (reason == Reason::kHit) return outputs.mark_written(module->adapter) ? outputs.result() : nullptr;
    if (reason == Reason::kEmpty) {
      module->stats.count(reason);
      return outputs.result();
    }
  }
  if (reason == Reason::kDeviceError) return fail(reason);
  return call_native(reason, module->native, args, kSpec.inputs.size);
}

// Returns why the caller's outputs keep a variant from writing into them.
[[nodiscard]] Reason check_own_outputs(PyObject* const* outputs, bool grad_mode, std::int32_t region, Reason chosen,
                                       Call& call) {
  Reason reason = read_outputs(module->adapter, kSpec, outputs, grad_mode, call);
  if (reason == Reason::kHit) reason = check_outputs(kSpec, call);
  for (std::int32_t i = 0; i < kSpec.outputs.size && reason == Reason::kHit && chosen == Reason::kHit; ++i) {
    reason = check_output(kTable, region, call, i, true);
  }
  return reason == Reason::kHit ? chosen : reason;
}

PyObject* run_out(PyObject*, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  PyObject* scratch[kMaxTensors + kMaxOutputs];
  args = bind_arguments({"run_out", &kSpec, true}, args, num_args, keywords, scratch);
  if (args == nullptr) return nullptr;
  PyObject* const* outputs = args + kSpec.inputs.size;
  Call call;
  const bool grad_mode = module->standing == Reason::kHit && module->adapter.grad_mode();
  const auto [found, region] = choose_and_prepare(args, grad_mode, call);
  Reason reason = found;
  if (reason == Reason::kHit || reason == Reason::kEmpty) {
    reason = check_own_outputs(outputs, grad_mode, region, reason, call);
  }
  if (reason == Reason::kHit) reason = serve(region, call);
  if (reason == Reason::kDeviceError) return fail(reason);
  if (reason == Reason::kEmpty) {
    module->stats.count(reason);
  } else if (reason == Reason::kHit) {
    for (std::int32_t i = 0; i < kSpec.outputs.size; ++i) {
      if (!module->adapter.mark_written(outputs[i])) return nullptr;
    }
  } else {
    const Ref result(call_native(reason, module->native_out, args, kSpec.inputs.size + kSpec.outputs.size));
    if (!result) return nullptr;
  }
  Py_RETURN_NONE;
}

// Returns (reason, region or -1, sizes of the axes or None where they are not known) and runs nothing.
PyObject* choose_only(PyObject*, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  PyObject* scratch[kMaxTensors];
  args = bind_arguments({"explain", &kSpec, false}, args, num_args, keywords, scratch);
  if (args == nullptr) return nullptr;
  Call call;
  call.axes[0] = kVaries;
  const bool grad_mode = module->standing == Reason::kHit && module->adapter.grad_mode();
  auto [reason, region] = choose_for(args, grad_mode, call);
  if (reason == Reason::kUnprepared) reason = module->cuda.foresee(call.place.index, kTable.cuda, module->accept_gpu);
  const bool bound = reason == Reason::kHit || reason > Reason::kNoData;
  Ref axes = Ref::borrow(Py_None);
  if (bound) {
    axes = Ref(PyDict_New());
    for (std::int32_t i = 0; axes && i < kSpec.axes.size; ++i) {
      const Ref size(PyLong_FromLongLong(call.axes[i]));
      if (!size || PyDict_SetItemString(axes.get(), kSpec.axes[i].name, size.get()) != 0) return nullptr;
    }
  }
  return axes ? Py_BuildValue("(siO)", text_of(reason).word, region, axes.get()) : nullptr;
}

py::dict stats() {
  py::dict hits;
  py::dict native;
  std::int64_t calls = 0;
  for (std::int32_t i = 0; i < kTable.variants.size; ++i) {
    hits[kTable.variants[i].symbol] = module->stats.hits(i);
    calls += module->stats.hits(i);
  }
  std::int64_t empty = 0;
  std::int64_t raised = 0;
  for (int i = 0; i < kNumReasons; ++i) {
    const std::int64_t count = module->stats.others(static_cast<Reason>(i));
    calls += count;
    if (static_cast<Reason>(i) == Reason::kEmpty) {
      empty = count;
    } else if (static_cast<Reason>(i) == Reason::kDeviceError) {
      raised = count;
    } else if (count != 0) {
      native[kReasonTexts[i].word] = count;
    }
  }
  py::dict out;
  out["calls"] = calls;
  out["hits"] = hits;
  out["empty"] = empty;
  out["raised"] = raised;
  out["native"] = native;
  out["serial_regions"] = parallel_runtime().num_serial.load(std::memory_order_relaxed);
  return out;
}

py::object error_name(cuda::Result error) {
  const char* name = nullptr;
  if (error == cuda::kSuccess || module->cuda.driver()->get_error_name(error, &name) != cuda::kSuccess) return py::none();
  return py::str(name);
}

// What is known of GPU `index`: its state, what it is, and what went wrong.
py::dict device(std::int32_t index) {
  const cuda::DeviceRecord& record = module->cuda.devices()[index];
  py::dict out;
  out["reason"] = text_of(module->cuda.state(index)).word;
  out["compute_capability"] = record.silicon.compute_capability;
  out["num_sms"] = record.silicon.num_sms;
  out["l2_bytes"] = record.silicon.l2_bytes;
  out["memory_bytes"] = record.silicon.memory_bytes;
  out["error"] = error_name(record.error);
  out["variant"] = record.variant < 0 ? py::object(py::none()) : py::str(kTable.variants[record.variant].symbol);
  py::list declined;
  for (std::int32_t i = 0; i < kTable.variants.size; ++i) {
    if (module->cuda.devices().has_declined(index, i)) declined.append(kTable.variants[i].symbol);
  }
  out["declined"] = declined;
  return out;
}

// Version of the cuBLASLt that torch calls, as text.
py::object cublas_version() {
  const cuda::CublasLt* library = cuda::cublaslt();
  if (library == nullptr) return py::none();
  const std::size_t version = library->get_version();
  return py::str(std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
                 std::to_string(version % 100));
}

py::dict cuda_host() {
  py::dict out;
  int version = 0;
  const cuda::Driver* driver = module->cuda.driver();
  const bool known = driver != nullptr && driver->driver_get_version(&version) == cuda::kSuccess;
  out["cuda_driver"] =
      known ? py::object(py::str(std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10))) : py::none();
  out["cublas"] = cublas_version();
  return out;
}

py::dict host() {
  if (kTable.target == Target::kCuda) return cuda_host();
  py::list isa;
  for (const char* level : {"avx2", "avx512", "avx512_bf16", "amx_bf16"}) {
    if (module->host.isa.has(level)) isa.append(level);
  }
  py::dict out;
  out["model"] = static_cast<const char*>(module->host.model.text);
  out["isa"] = isa;
  out["l2_bytes"] = module->host.l2_bytes;
  out["l3_bytes"] = module->host.l3_bytes;
  return out;
}

py::dict reasons() {
  py::dict out;
  for (const ReasonText& text : kReasonTexts) out[text.word] = text.sentence;
  return out;
}

// Holds torch and the machine to the table. Called once, before the first call.
void start(const py::module_& torch, bool accept_cpu, bool accept_gpu, bool enabled, const py::object& on_device) {
  module->enabled = enabled;
  module->accept_gpu = accept_gpu;
  module->on_device = Ref::borrow(on_device.ptr());
  module->standing = module->adapter.start(torch.ptr()) ? Reason::kHit : Reason::kTorch;
  start_parallel(OpenMp::find(module->adapter.library()));
  if (kTable.target == Target::kCuda) {
    if (!module->cuda.start() && module->standing == Reason::kHit) module->standing = Reason::kDriver;
    return;
  }
  for (const Variant& variant : kTable.variants) {
    if (detail::same_text(variant.isa, "amx_bf16")) module->host.isa.amx_bf16 &= request_amx();
  }
  if (module->standing == Reason::kHit) module->standing = check_host(kTable.cpu, module->host, accept_cpu);
}

// Sends every call to native: the environment is another one, and the policy says so.
void stand_down() {
  if (module->standing == Reason::kHit) module->standing = Reason::kChanged;
}

// Prepares GPU `index`; returns its state as a word.
const char* prepare_device(std::int32_t index) {
  const Reason reason = module->standing == Reason::kHit ? prepare(index) : module->standing;
  if (reason == Reason::kDeviceError) throw py::error_already_set();
  return text_of(reason).word;
}

void set_native(const py::object& native, const py::object& native_out) {
  module->native = Ref::borrow(native.ptr());
  module->native_out = Ref::borrow(native_out.ptr());
}

PyCFunction as_method(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"run", as_method(run), METH_FASTCALL | METH_KEYWORDS,
     "run(*inputs)\n\nReturn the outputs, by the fastest proven variant or by native."},
    {"run_out", as_method(run_out), METH_FASTCALL | METH_KEYWORDS,
     "run_out(*inputs, *outputs)\n\nWrite into the given outputs, by the fastest proven variant or by native."},
    {"choose", as_method(choose_only), METH_FASTCALL | METH_KEYWORDS,
     "choose(*inputs)\n\nReturn (reason, region or -1, axes or None) and run nothing."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace
}  // namespace fibc

PYBIND11_MODULE(_native, m) {
  using namespace fibc;  // NOLINT
  module = new Module;
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
  m.def("start", &start, py::arg("torch"), py::arg("accept_cpu"), py::arg("accept_gpu"), py::arg("enabled"),
        py::arg("on_device"));
  m.def("stand_down", &stand_down);
  m.def("prepare", &prepare_device, py::arg("index"));
  m.def("device", &device, py::arg("index"));
  m.def("set_native", &set_native, py::arg("native"), py::arg("native_out"));
  m.def("set_enabled", [](bool enabled) { module->enabled = enabled; }, py::arg("enabled"));
  m.def("is_enabled", [] { return module->enabled.load(); });
  m.def("stats", &stats);
  m.def("host", &host);
  m.def("reasons", &reasons);
  m.def("standing", [] { return text_of(module->standing).word; });
  m.def("num_threads", [] { return module->adapter.num_threads(); });
  m.def("has_openmp", [] { return static_cast<bool>(parallel_runtime().openmp); });
  m.def("uses_torch_abi", [] { return module->adapter.uses_abi(); });
  m.def("use_torch_abi", [](bool use) { module->adapter.use_abi(use); }, py::arg("use"));
  m.def("table_json", [] { return kTable.json; });
  m.attr("digest") = kTable.digest;
}
