// The extension that tuning workers load: calls a candidate's library as a generated module would, and times calls.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "fibc/axes.h"
#include "fibc/dispatch.h"
#include "fibc/entry/arguments.h"
#include "fibc/entry/cuda_calls.h"
#include "fibc/entry/outputs.h"
#include "fibc/parallel.h"

namespace py = pybind11;

namespace fibc {
namespace {

TensorAdapter* adapter = nullptr;  // never freed: at exit Python ends before static objects do
CudaCalls* gpus = nullptr;
std::int32_t num_threads = 0;  // 0: as torch says at each call

// A CallSpec read from its msgpack bytes; owns what the Spec points to.
class OwnedSpec {
 public:
  explicit OwnedSpec(const py::bytes& encoded) {
    const py::object plain = py::module_::import("msgpack").attr("unpackb")(encoded);
    definition_ = plain["definition"].cast<std::string>();
    for (const py::handle axis : plain["axes"]) {
      const py::object value = axis["value"];
      axes_.push_back({keep(axis["name"]), value.is_none() ? kVaries : value.cast<std::int64_t>()});
    }
    read(plain["inputs"], inputs_);
    read(plain["outputs"], outputs_);
    const auto count = [](const auto& list) { return static_cast<std::int32_t>(list.size()); };
    if (inputs_.size() > kMaxTensors || outputs_.size() > kMaxOutputs || axes_.size() > kMaxAxes) {
      throw py::value_error(definition_ + ": too many arguments or axes for one call");
    }
    spec_ = {definition_.c_str(),
             {axes_.data(), count(axes_)},
             {inputs_.data(), count(inputs_)},
             {outputs_.data(), count(outputs_)}};
  }
  OwnedSpec(const OwnedSpec&) = delete;
  OwnedSpec& operator=(const OwnedSpec&) = delete;

  [[nodiscard]] const Spec& spec() const noexcept { return spec_; }

 private:
  [[nodiscard]] const char* keep(const py::handle& text) {
    texts_.push_back(std::make_unique<std::string>(text.cast<std::string>()));
    return texts_.back()->c_str();
  }

  void read(const py::handle& plain, std::vector<Argument>& out) {
    for (const py::handle argument : plain) {
      const auto kind = argument["kind"].cast<std::string>();
      const auto dtype = argument["dtype"].cast<std::string>();
      const DType code = dtype_of(dtype.c_str());
      if (code.bits == 0) throw py::value_error(definition_ + ": unknown dtype " + dtype);
      lists_.push_back(std::make_unique<std::vector<std::int32_t>>());
      for (const py::handle axis : argument["axes"]) lists_.back()->push_back(axis.cast<std::int32_t>());
      const py::object alias = argument["alias"];
      out.push_back({keep(argument["name"]),
                     kind == "tensor" ? Kind::kTensor : kind == "scalar" ? Kind::kScalar : Kind::kScalarTensor, code,
                     {lists_.back()->data(), static_cast<std::int32_t>(lists_.back()->size())},
                     argument["optional"].cast<bool>(), alias.is_none() ? kNoAlias : alias.cast<std::int32_t>()});
    }
  }

  std::string definition_;
  std::vector<std::unique_ptr<std::string>> texts_;
  std::vector<std::unique_ptr<std::vector<std::int32_t>>> lists_;
  std::vector<Axis> axes_;
  std::vector<Argument> inputs_;
  std::vector<Argument> outputs_;
  Spec spec_{};
};

// A callable object: run by value when it is called, `run_out` as a method. Its library stays loaded for good: a kernel may
// own thread-local state.
struct Candidate {
  PyObject_HEAD
  vectorcallfunc call;
  OwnedSpec* owned;
  std::string* symbol;
  Variant variant;           // its entries
  std::int32_t device_type;  // where its tensors have to be
  std::uint64_t loaded;      // a bit per GPU

  [[nodiscard]] const Spec& spec() const noexcept { return owned->spec(); }
};

// Makes a GPU ready for the candidate, where it is not yet.
[[nodiscard]] Reason prepare(Candidate& candidate, std::int32_t index) {
  Reason reason = gpus->state(index);
  if (reason == Reason::kUnprepared) reason = gpus->prepare(*adapter, index, nullptr, false, {});
  const std::uint64_t bit = std::uint64_t{1} << (index & 63);
  if (reason != Reason::kHit || (candidate.loaded & bit) != 0) return reason;
  reason = gpus->load(candidate.variant, index);
  if (reason == Reason::kHit) candidate.loaded |= bit;
  return reason;
}

[[nodiscard]] Reason serve(Candidate& candidate, const Call& call) {
  if (candidate.device_type == kCpuDevice) {
    return launch(candidate.variant.entry, call, parallel) == FIBC_OK ? Reason::kHit : Reason::kKernel;
  }
  const Reason reason = prepare(candidate, call.place.index);
  return reason == Reason::kHit ? gpus->launch(*adapter, candidate.variant, 0, call) : reason;
}

[[nodiscard]] PyObject* fail(const Candidate& candidate, const char* function, Reason reason, const Call& call) {
  const Spec& spec = candidate.spec();
  if (reason == Reason::kDeviceError) {
    gpus->raise_error(spec.definition, candidate.symbol->c_str(), call.place.index);
  } else {
    PyErr_Format(PyExc_RuntimeError, "%s: %s: %s", spec.definition, function, text_of(reason).sentence);
  }
  return nullptr;
}

[[nodiscard]] std::int32_t threads_now() {
  return usable_threads(num_threads > 0 ? num_threads : adapter->num_threads());
}

PyObject* run(PyObject* self, PyObject* const* args, std::size_t num_args_and_flag, PyObject* keywords) {
  auto& candidate = *reinterpret_cast<Candidate*>(self);
  const Spec& spec = candidate.spec();
  PyObject* scratch[kMaxTensors];
  args = bind_arguments({"run", &spec, false}, args, PyVectorcall_NARGS(num_args_and_flag), keywords, scratch);
  if (args == nullptr) return nullptr;
  Call call;
  call.num_threads = threads_now();
  Reason reason = read_inputs(*adapter, spec, args, adapter->grad_mode(), call);
  if (reason == Reason::kHit) reason = bind_inputs(spec, candidate.device_type, call);
  Outputs outputs(spec);
  for (std::int32_t i = 0; i < spec.outputs.size && reason == Reason::kHit; ++i) {
    reason = outputs.make(*adapter, args, call, i);
  }
  if (reason == Reason::kHit) reason = serve(candidate, call);
  return reason == Reason::kHit ? outputs.result() : fail(candidate, "run", reason, call);
}

PyObject* run_out(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  auto& candidate = *reinterpret_cast<Candidate*>(self);
  const Spec& spec = candidate.spec();
  PyObject* scratch[kMaxTensors + kMaxOutputs];
  args = bind_arguments({"run_out", &spec, true}, args, num_args, keywords, scratch);
  if (args == nullptr) return nullptr;
  Call call;
  call.num_threads = threads_now();
  const bool grad_mode = adapter->grad_mode();
  Reason reason = read_inputs(*adapter, spec, args, grad_mode, call);
  if (reason == Reason::kHit) reason = bind_inputs(spec, candidate.device_type, call);
  if (reason == Reason::kHit) reason = read_outputs(*adapter, spec, args + spec.inputs.size, grad_mode, call);
  if (reason == Reason::kHit) reason = check_outputs(spec, call);
  if (reason == Reason::kHit) reason = serve(candidate, call);
  if (reason != Reason::kHit) return fail(candidate, "run_out", reason, call);
  Py_RETURN_NONE;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Candidate*>(self)->owned;
  delete reinterpret_cast<Candidate*>(self)->symbol;
  type->tp_free(self);
  Py_DECREF(type);
}

[[nodiscard]] PyTypeObject* make_type() {
  static PyMethodDef methods[] = {
      {"run_out", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_out)), METH_FASTCALL | METH_KEYWORDS,
       "run_out(*inputs, *outputs): write into the given outputs."},
      {nullptr, nullptr, 0, nullptr}};
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Candidate, call), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_methods, methods},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec = {"_harness.Candidate", static_cast<int>(sizeof(Candidate)), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

PyTypeObject* candidate_type = nullptr;

template <typename Function>
[[nodiscard]] Function* find(void* handle, const std::string& library, const std::string& symbol) {
  auto* function = reinterpret_cast<Function*>(dlsym(handle, symbol.c_str()));
  if (function == nullptr) throw py::value_error(library + ": exports no symbol " + symbol);
  return function;
}

// The index in `device`, "cuda" or "cuda:1"; the current one where it names none.
[[nodiscard]] std::int32_t index_of(const std::string& device) {
  const py::module_ torch = py::module_::import("torch");
  const py::object index = torch.attr("device")(device).attr("index");
  return (index.is_none() ? py::object(torch.attr("cuda").attr("current_device")()) : index).cast<std::int32_t>();
}

py::object bind(const std::string& library, const std::string& symbol, const py::bytes& spec,
                const std::string& device) {
  auto owned = std::make_unique<OwnedSpec>(spec);
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw py::value_error(std::string("cannot load: ") + dlerror());
  Variant variant{};
  const bool on_cpu = device == "cpu";
  variant.entry = find<std::remove_pointer_t<fibc_kernel>>(handle, library, symbol);
  if (!on_cpu) {
    variant.workspace = find<std::remove_pointer_t<fibc_workspace>>(handle, library, symbol + "_workspace");
    variant.prepare = find<std::remove_pointer_t<fibc_prepare>>(handle, library, symbol + "_prepare");
  }
  auto* candidate = reinterpret_cast<Candidate*>(candidate_type->tp_alloc(candidate_type, 0));
  if (candidate == nullptr) throw py::error_already_set();
  auto result = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(candidate));
  candidate->call = run;
  candidate->owned = owned.release();
  candidate->symbol = new std::string(symbol);
  candidate->variant = variant;
  candidate->device_type = on_cpu ? kCpuDevice : kCudaDevice;
  if (on_cpu) return result;
  if (!gpus->start()) throw py::value_error(symbol + ": " + text_of(Reason::kDriver).sentence);
  Call call;
  call.place = {kCudaDevice, index_of(device)};
  if (const Reason reason = prepare(*candidate, call.place.index); reason != Reason::kHit) {
    (void)fail(*candidate, "bind", reason, call);
    throw py::error_already_set();
  }
  return result;
}

// What a call itself costs: takes anything, returns None.
PyObject* nothing(PyObject*, PyObject* const*, Py_ssize_t, PyObject*) { Py_RETURN_NONE; }

PyMethodDef functions[] = {{"nothing", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(nothing)),
                            METH_FASTCALL | METH_KEYWORDS, "nothing(*arguments): return None, for a baseline."},
                           {nullptr, nullptr, 0, nullptr}};

// Makes `inner` calls, the i-th with calls[(start + i) % len(calls)]; results are dropped as they come. Returns seconds per
// call, of the host alone.
double time_calls(const py::object& function, const py::list& calls, std::size_t start, std::size_t inner) {
  if (calls.empty() || inner == 0) throw py::value_error("needs at least one call and inner >= 1");
  std::vector<py::tuple> tuples;
  std::vector<std::vector<PyObject*>> arguments;  // one leading slot, which vectorcall may use
  for (const py::handle call : calls) {
    tuples.push_back(py::reinterpret_borrow<py::object>(call).cast<py::tuple>());
    std::vector<PyObject*> list(1, nullptr);
    for (const py::handle item : tuples.back()) list.push_back(item.ptr());
    arguments.push_back(std::move(list));
  }
  std::size_t next = start % arguments.size();
  const auto begin = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < inner; ++i) {
    const std::vector<PyObject*>& list = arguments[next];
    PyObject* result = PyObject_Vectorcall(function.ptr(), list.data() + 1,
                                           (list.size() - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (result == nullptr) throw py::error_already_set();
    Py_DECREF(result);
    if (++next == arguments.size()) next = 0;
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  return elapsed.count() / static_cast<double>(inner);
}

}  // namespace
}  // namespace fibc

PYBIND11_MODULE(_harness, m) {
  m.doc() = "Calls a candidate as a generated module would, and times calls in C.";
  const py::module_ torch = py::module_::import("torch");
  fibc::adapter = new fibc::TensorAdapter();
  if (!fibc::adapter->start(torch.ptr())) {
    throw py::import_error("needs the DLPack exchange interface of torch 2.10, found torch " +
                           torch.attr("__version__").cast<std::string>() +
                           " (accepted: 2.10 and newer; upgrade torch)");
  }
  if (fibc::detect_isa().amx_bf16) (void)fibc::request_amx();  // where refused, a candidate's SIGILL says so
  fibc::start_parallel(fibc::OpenMp::find(fibc::adapter->library()));
  fibc::candidate_type = fibc::make_type();
  if (fibc::candidate_type == nullptr) throw py::error_already_set();
  if (PyModule_AddFunctions(m.ptr(), fibc::functions) != 0) throw py::error_already_set();
  fibc::gpus = new fibc::CudaCalls();
  m.def("bind", &fibc::bind, py::arg("library_path"), py::arg("symbol"), py::arg("spec"), py::arg("device") = "cpu");
  m.def("time_calls", &fibc::time_calls, py::arg("callable"), py::arg("calls"), py::arg("start"), py::arg("inner"));
  m.def(
      "call_many",
      [](const py::object& function, const py::list& calls, std::size_t start, std::size_t inner) {
        (void)fibc::time_calls(function, calls, start, inner);
      },
      py::arg("callable"), py::arg("calls"), py::arg("start"), py::arg("inner"));
  m.def(
      "fill_allocations", [](bool fills) { fibc::adapter->fill(fills); }, py::arg("fills"));
  m.def(
      "set_num_threads",
      [](std::int32_t count) {
        if (count < 0) throw py::value_error("set_num_threads: must be >= 1, or 0 to follow torch");
        fibc::num_threads = count;
      },
      py::arg("num_threads"));
}
