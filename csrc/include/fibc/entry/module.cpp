// The entry that every generated module shares, compiled once; the table comes from the module's own translation unit.
#include <pybind11/pybind11.h>

#include <atomic>

#include "fibc/dispatch.h"
#include "fibc/entry/arguments.h"
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
  const std::int32_t num_threads = module->adapter.num_threads();
  if (num_threads != kTable.validity.num_threads) return Reason::kNumThreads;
  call.num_threads = usable_threads(num_threads);
  return module->adapter.is_watched() ? Reason::kMode : Reason::kHit;
}

[[nodiscard]] Choice choose_for(PyObject* const* args, bool grad_mode, Call& call) {
  if (const Reason reason = check_surroundings(call); reason != Reason::kHit) return {reason, kNoRegion};
  const Reason reason = read_inputs(module->adapter, kSpec, args, grad_mode, call);
  return reason == Reason::kHit ? choose(kTable, module->host.isa, call) : Choice{reason, kNoRegion};
}

// Runs the region's variant on a call whose guards have passed.
[[nodiscard]] Reason serve(std::int32_t region, const Call& call) {
  const Region& served = kTable.regions[region];
  const fibc_kernel entry = kTable.variants[served.variant].entry;
  std::int32_t status = 0;
  if (served.release_gil) {
    PyThreadState* state = PyEval_SaveThread();
    status = launch(entry, call, parallel);
    PyEval_RestoreThread(state);
  } else {
    status = launch(entry, call, parallel);
  }
  if (status != 0) return Reason::kKernel;
  module->stats.count_hit(served.variant);
  return Reason::kHit;
}

PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  PyObject* scratch[kMaxTensors];
  args = bind_arguments({"run", &kSpec, false}, args, num_args, keywords, scratch);
  if (args == nullptr) return nullptr;
  Call call;
  const auto [found, region] = choose_for(args, module->standing == Reason::kHit && module->adapter.grad_mode(), call);
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
  const auto [found, region] = choose_for(args, grad_mode, call);
  Reason reason = found;
  if (reason == Reason::kHit || reason == Reason::kEmpty) {
    reason = check_own_outputs(outputs, grad_mode, region, reason, call);
  }
  if (reason == Reason::kHit) reason = serve(region, call);
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
  const auto [reason, region] = choose_for(args, grad_mode, call);
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
  for (int i = 0; i < kNumReasons; ++i) {
    const std::int64_t count = module->stats.others(static_cast<Reason>(i));
    calls += count;
    if (static_cast<Reason>(i) == Reason::kEmpty) {
      empty = count;
    } else if (count != 0) {
      native[kReasonTexts[i].word] = count;
    }
  }
  py::dict out;
  out["calls"] = calls;
  out["hits"] = hits;
  out["empty"] = empty;
  out["native"] = native;
  out["serial_regions"] = parallel_runtime().num_serial.load(std::memory_order_relaxed);
  return out;
}

py::dict host() {
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
void start(const py::module_& torch, bool accept_cpu, bool enabled) {
  module->enabled = enabled;
  module->standing = module->adapter.start(torch.ptr()) ? Reason::kHit : Reason::kTorch;
  start_parallel(OpenMp::find(module->adapter.library()));
  for (const Variant& variant : kTable.variants) {
    if (detail::same_text(variant.isa, "amx_bf16")) module->host.isa.amx_bf16 &= request_amx();
  }
  if (module->standing == Reason::kHit) module->standing = check_host(kTable.validity, module->host, accept_cpu);
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
  m.def("start", &start, py::arg("torch"), py::arg("accept_cpu"), py::arg("enabled"));
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
