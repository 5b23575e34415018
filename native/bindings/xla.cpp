// The calls of functions that JAX has compiled: XLA calls a handler here, in any thread, without the interpreter's
// lock.
//
// A call has a number, which is an attribute of XLA's custom call. The object of Python that has the number is kept by
// the compiled function; the registry finds it for as long as it lives.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "bindings.hpp"
#include "python_group.hpp"
#include "xla/compiled_call.hpp"

using namespace nanobind::literals;

namespace procgroup {
namespace {

constexpr const char* kAttribute = "call";

class PythonCompiledCall {
 public:
  PythonCompiledCall(const PythonGroup& group, const FunctionalCall& call, const std::vector<Dtype>& dtypes,
                     nb::object run, nb::object describe_error)
      : group_(group.direct()), call_(call, dtypes), run_(std::move(run)), describe_error_(std::move(describe_error)) {}

  // `stream` is XLA's on a GPU, and null on a CPU. Throws nb::python_error.
  void run(const FlatArrays& given, const FlatArrays& results, CudaStream stream) const {
    UnlockedPythonRuntime language;
    try {
      const bool is_direct = group_.runs_compiled() && !inside_transfer();
      std::optional<XlaGpu> gpu;
      if (stream != nullptr) gpu.emplace(stream, is_direct ? load_nccl() : nullptr);
      if (!is_direct) {
        const auto run = [this](const FlatArrays& from, const FlatArrays& to) { run_in_python(from, to); };
        if (gpu) return run_on_copies(*gpu, given, results, group_.seconds(), language, run);
        return run(given, results);
      }
      group_.engine()->engine()->note_caller();
      call_.run(*group_.group(), given, results, group_.seconds(), language, gpu ? &*gpu : nullptr);
      language.rethrow();
    } catch (const OperationFailed& failed) {
      language.rethrow();
      const Relocked relocked;
      raise(build_exception(failed.failure, failed.call, *group_.group()));
    } catch (const std::invalid_argument& error) {
      raise_own("ArgumentError", error);
    } catch (const std::runtime_error& error) {  // of the GPU
      raise_own("DistBackendError", error);
    }
  }

  // The text of XLA's error. The exception itself is kept for procgroup.functional.jit_errors.
  std::string describe(const nb::python_error& error) const {
    const Relocked relocked;
    try {
      return nb::cast<std::string>(describe_error_(error.value()));
    } catch (const std::exception&) {  // a signal's handler raises, or the text is not Unicode
      return error.what();
    }
  }

 private:
  [[noreturn]] static void raise_own(const char* type, const std::exception& error) {
    const Relocked relocked;
    raise(nb::module_::import_("procgroup.errors").attr(type)(error.what()));
  }

  // That of the group, where it makes this call. Its first call loads NCCL, with the interpreter's lock.
  std::shared_ptr<NcclBackend> load_nccl() const {
    const std::shared_ptr<NcclBackend>& nccl = group_.nccl();
    if (nccl && call_.uses(*nccl))
      std::call_once(has_loaded_, [&] {
        const Relocked relocked;
        nccl->load();
      });
    return nccl;
  }

  // By the group's methods, where another backend moves the elements, or the group is in a state that looks at its
  // calls.
  void run_in_python(const FlatArrays& given, const FlatArrays& results) const {
    const Relocked relocked;
    const auto views = [](const FlatArrays& arrays, int access) {
      nb::list list;
      for (const FlatArray& array : arrays)
        list.append(nb::steal(PyMemoryView_FromMemory(
            static_cast<char*>(array.data), static_cast<Py_ssize_t>(array.count * dtype_size(array.dtype)), access)));
      return list;
    };
    run_(views(given, PyBUF_READ), views(results, PyBUF_WRITE));
  }

  const PythonGroup group_;
  const CompiledCall call_;
  const nb::object run_;
  const nb::object describe_error_;
  mutable std::once_flag has_loaded_;
};

// Threads of XLA may use it while the process ends.
struct Registry {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::shared_ptr<const PythonCompiledCall>> calls;
  uint64_t last = 0;
};
Registry& registry() {
  static auto& one = *new Registry;
  return one;
}

std::shared_ptr<const PythonCompiledCall> find(uint64_t number) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().calls.find(number);
  return found == registry().calls.end() ? nullptr : found->second;
}

// The registration of a call, as an object of Python.
class Registered {
 public:
  explicit Registered(std::shared_ptr<const PythonCompiledCall> call) {
    const std::lock_guard lock(registry().mutex);
    number_ = ++registry().last;
    registry().calls.emplace(number_, std::move(call));
  }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;
  ~Registered() {
    std::shared_ptr<const PythonCompiledCall> ended;  // without the mutex: it may run Python
    const std::lock_guard lock(registry().mutex);
    ended = std::move(registry().calls.extract(number_).mapped());
  }

  uint64_t number() const { return number_; }

 private:
  uint64_t number_;
};

void compile(Registered* self, const PythonGroup& group, const char* name, const std::vector<std::string>& dtypes,
             int root, int source, nb::handle op, uint64_t tag, uint32_t line, nb::object run,
             nb::object describe_error) {
  FunctionalCall call{.op = op_from_name(name), .root = root, .source = source, .tag = tag, .line = line};
  std::vector<Dtype> types;
  for (const std::string& dtype : dtypes) types.push_back(dtype_from_name(dtype.c_str()));
  if (reduces(call.op))
    for (const Dtype dtype : types) {
      const Reduction reduction = group.site(name).reduction(op, dtype);
      call.reduce_op = reduction.op;
      call.factor = reduction.factor;
    }
  new (self) Registered(std::shared_ptr<const PythonCompiledCall>(
      new PythonCompiledCall(group, call, types, std::move(run), std::move(describe_error)),
      &delete_with_lock<const PythonCompiledCall>));
}

template <bool kIsOnGpu>
xla::Error* handle(xla::CallFrame* frame) {
  std::shared_ptr<const PythonCompiledCall> call;
  try {
    if (const std::string misfit = misfit_of(*frame); !misfit.empty()) return make_error(*frame->api, misfit);
    if (answer_metadata(*frame)) return nullptr;
    const uint64_t number = attribute_of(frame->attributes, kAttribute);
    call = find(number);
    if (!call)
      return make_error(*frame->api, "This process has no call of procgroup number " + std::to_string(number) +
                                         ": the function was compiled by another process. Compile it in this one.");
    CudaStream stream = nullptr;
    if constexpr (kIsOnGpu)
      if (xla::Error* const error = read_stream(*frame, stream); error != nullptr) return error;
    call->run(arrays_of(frame->arguments), arrays_of(frame->results), stream);
    return nullptr;
  } catch (const nb::python_error& error) {
    return make_error(*frame->api, call->describe(error));
  } catch (const std::exception& error) {
    return make_error(*frame->api, error.what());
  }
}

}  // namespace
}  // namespace procgroup

using namespace procgroup;

void bind_xla(nb::module_& module) {
  module.def(
      "xla_handler",
      [](bool on_gpu) { return nb::capsule(reinterpret_cast<const void*>(on_gpu ? &handle<true> : &handle<false>)); },
      nb::kw_only(), "on_gpu"_a, nb::sig("def xla_handler(*, on_gpu: bool) -> object"),
      "Return the address of the handler of XLA's custom calls on CPUs, or on GPUs of NVIDIA, in a capsule.");
  nb::class_<Registered>(module, "CompiledCall",
                         "A call of a function that XLA has compiled; found by its number while this object lives.")
      .def("__init__", &compile, "group"_a, "name"_a, "dtypes"_a, nb::kw_only(), "root"_a, "source"_a, "op"_a.none(),
           "tag"_a, "line"_a, "run"_a, "describe_error"_a)
      .def_prop_ro("number", &Registered::number);
}
