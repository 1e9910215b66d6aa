// The extension that tuning workers load: calls a candidate's library as a generated module would, and times calls.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "fibc/axes.h"
#include "fibc/dispatch.h"
#include "fibc/entry/arguments.h"
#include "fibc/entry/outputs.h"
#include "fibc/parallel.h"

namespace py = pybind11;

namespace fibc {
namespace {

TensorAdapter* adapter = nullptr;  // never freed: at exit Python ends before static objects do
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
  fibc_kernel entry;

  [[nodiscard]] const Spec& spec() const noexcept { return owned->spec(); }
};

[[nodiscard]] PyObject* fail(const Spec& spec, const char* function, Reason reason) {
  PyErr_Format(PyExc_RuntimeError, "%s: %s: %s", spec.definition, function, text_of(reason).sentence);
  return nullptr;
}

[[nodiscard]] std::int32_t threads_now() {
  return usable_threads(num_threads > 0 ? num_threads : adapter->num_threads());
}

PyObject* run(PyObject* self, PyObject* const* args, std::size_t num_args_and_flag, PyObject* keywords) {
  const auto& candidate = *reinterpret_cast<const Candidate*>(self);
  const Spec& spec = candidate.spec();
  PyObject* scratch[kMaxTensors];
  args = bind_arguments({"run", &spec, false}, args, PyVectorcall_NARGS(num_args_and_flag), keywords, scratch);
  if (args == nullptr) return nullptr;
  Call call;
  call.num_threads = threads_now();
  Reason reason = read_inputs(*adapter, spec, args, adapter->grad_mode(), call);
  if (reason == Reason::kHit) reason = bind_inputs(spec, call);
  Outputs outputs(spec);
  for (std::int32_t i = 0; i < spec.outputs.size && reason == Reason::kHit; ++i) {
    reason = outputs.make(*adapter, args, call, i);
  }
  if (reason == Reason::kHit && launch(candidate.entry, call, parallel) != 0) reason = Reason::kKernel;
  return reason == Reason::kHit ? outputs.result() : fail(spec, "run", reason);
}

PyObject* run_out(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  const auto& candidate = *reinterpret_cast<const Candidate*>(self);
  const Spec& spec = candidate.spec();
  PyObject* scratch[kMaxTensors + kMaxOutputs];
  args = bind_arguments({"run_out", &spec, true}, args, num_args, keywords, scratch);
  if (args == nullptr) return nullptr;
  Call call;
  call.num_threads = threads_now();
  const bool grad_mode = adapter->grad_mode();
  Reason reason = read_inputs(*adapter, spec, args, grad_mode, call);
  if (reason == Reason::kHit) reason = bind_inputs(spec, call);
  if (reason == Reason::kHit) reason = read_outputs(*adapter, spec, args + spec.inputs.size, grad_mode, call);
  if (reason == Reason::kHit) reason = check_outputs(spec, call);
  if (reason == Reason::kHit && launch(candidate.entry, call, parallel) != 0) reason = Reason::kKernel;
  if (reason != Reason::kHit) return fail(spec, "run_out", reason);
  Py_RETURN_NONE;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Candidate*>(self)->owned;
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

py::object bind(const std::string& library, const std::string& symbol, const py::bytes& spec) {
  auto owned = std::make_unique<OwnedSpec>(spec);
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw py::value_error(std::string("cannot load: ") + dlerror());
  const auto entry = reinterpret_cast<fibc_kernel>(dlsym(handle, symbol.c_str()));
  if (entry == nullptr) throw py::value_error(library + ": exports no symbol " + symbol);
  auto* candidate = reinterpret_cast<Candidate*>(candidate_type->tp_alloc(candidate_type, 0));
  if (candidate == nullptr) throw py::error_already_set();
  candidate->call = run;
  candidate->owned = owned.release();
  candidate->entry = entry;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(candidate));
}

// What a call itself costs: takes anything, returns None.
PyObject* nothing(PyObject*, PyObject* const*, Py_ssize_t, PyObject*) { Py_RETURN_NONE; }

PyMethodDef functions[] = {{"nothing", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(nothing)),
                            METH_FASTCALL | METH_KEYWORDS, "nothing(*arguments): return None, for a baseline."},
                           {nullptr, nullptr, 0, nullptr}};

// Seconds per call of `inner` calls, the i-th with calls[(start + i) % len(calls)]; results are dropped as they come.
double time_calls(const py::object& function, const py::list& calls, std::size_t start, std::size_t inner) {
  if (calls.empty() || inner == 0) throw py::value_error("time_calls: needs at least one call and inner >= 1");
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
  m.def("bind", &fibc::bind, py::arg("library_path"), py::arg("symbol"), py::arg("spec"));
  m.def("time_calls", &fibc::time_calls, py::arg("callable"), py::arg("calls"), py::arg("start"), py::arg("inner"));
  m.def(
      "set_num_threads",
      [](std::int32_t count) {
        if (count < 0) throw py::value_error("set_num_threads: must be >= 1, or 0 to follow torch");
        fibc::num_threads = count;
      },
      py::arg("num_threads"));
}
