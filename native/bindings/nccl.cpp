// NCCL and the GPUs of this process, as procgroup.backends.nccl uses them: see nccl/nccl_backend.hpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <memory>
#include <string>

#include "array_view.hpp"
#include "bindings.hpp"
#include "cuda/staging.hpp"
#include "nccl/nccl_memory.hpp"
#include "python_host.hpp"
#include "python_task.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;
using namespace procgroup;

namespace {

ReduceOp reduce_op_from_name(const std::string& name) {
  for (int op = 0; op < kReduceOps; ++op)
    if (name == reduce_op_name(static_cast<ReduceOp>(op))) return static_cast<ReduceOp>(op);
  return ReduceOp::kSum;  // where nothing is reduced
}

NcclId id_of(const nb::bytes& bytes) {
  NcclId id{};
  if (bytes.size() != id.bytes.size()) throw nb::value_error("expected an id of NCCL's, which has 128 bytes");
  std::memcpy(id.bytes.data(), bytes.c_str(), id.bytes.size());
  return id;
}

void on_first_call(NcclBackend& backend, nb::object load) {
  const std::shared_ptr<nb::object> held(new nb::object(std::move(load)), &delete_with_lock<nb::object>);
  backend.on_first_call([held] { return nb::cast<std::shared_ptr<NcclLibrary>>((*held)()); });
}

// The generators of `connect` run as those of a program's backend.
void on_connect(NcclBackend& backend, nb::object connect) {
  const std::shared_ptr<nb::object> held(new nb::object(std::move(connect)), &delete_with_lock<nb::object>);
  backend.on_connect([held, size = backend.size()](NcclBackend::Pair ranks) -> std::shared_ptr<Task> {
    const Relocked relocked;
    const auto start = [held, ranks](int, uint64_t) { return (*held)(ranks.first, ranks.second); };
    return make_python_task(nb::cpp_function(start), size);
  });
}

// Whether streams of this GPU can wait for words of memory, which gates need.
bool has_gate(int number) {
  Gpu& gpu = Gpu::get(number);
  const OnGpu on_gpu(gpu);
  return gpu.has_words();
}

nb::dict interface_of(const NcclMemory& memory) {
  nb::dict interface;
  interface["version"] = 3;
  interface["shape"] = nb::make_tuple(memory.bytes());
  interface["typestr"] = "|u1";
  interface["data"] = nb::make_tuple(memory.address(), false);
  interface["strides"] = nb::none();
  interface["stream"] = nb::none();
  return interface;
}

}  // namespace

// The functions of an allocator, as torch.cuda.memory.CUDAPluggableAllocator finds them by name in this library. The
// memory can be used on every stream at once, and is freed when what uses it has ended.
extern "C" __attribute__((visibility("default"))) void* procgroup_allocate(size_t bytes, int device, void* /*stream*/) {
  return allocate_lent(bytes, device);
}
extern "C" __attribute__((visibility("default"))) void procgroup_free(void* memory, size_t /*bytes*/, int /*device*/,
                                                                      void* /*stream*/) {
  free_lent(memory);
}

void bind_nccl(nb::module_& module) {
  module.def("count_gpus", [] { return CudaDriver::get().count(); });
  module.def("staged_bytes", [](int number) { return staged_bytes(Gpu::get(number)); }, "gpu"_a);
  module.def("gpu_of", &gpu_of, "address"_a);
  module.def(
      "nccl_supports",
      [](const char* op, const char* dtype, const char* reduce_op) {
        return nccl_supports(op_from_name(op), dtype_from_name(dtype), reduce_op_from_name(reduce_op));
      },
      "op"_a, "dtype"_a, "reduce_op"_a);
  module.def("cuda_version", [] { return CudaDriver::get().version(); });
  module.def("gpu_name", [](int number) { return Gpu::get(number).name(); }, "number"_a);
  module.def("has_gate", &has_gate, "gpu"_a);
  module.def(
      "can_reach", [](int gpu, int other) { return Gpu::get(gpu).can_reach(Gpu::get(other)); }, "gpu"_a, "other"_a);
  module.def("gpu_uuid", [](int number) { return Gpu::get(number).uuid(); }, "number"_a);
  nb::class_<NcclLibrary>(module, "NcclLibrary")
      .def(nb::new_([](const std::string& path) { return std::make_shared<NcclLibrary>(path); }), "path"_a)
      .def_prop_ro("version", &NcclLibrary::version)
      .def("make_id", [](const NcclLibrary& self) {
        NcclId id{};
        self.require(self.ncclGetUniqueId(&id));
        return nb::bytes(id.bytes.data(), id.bytes.size());
      });
  nb::class_<NcclCommunicator>(module, "NcclCommunicator").def_prop_ro("is_connected", &NcclCommunicator::is_connected);
  nb::class_<NcclMemory>(module, "NcclMemory")
      .def_prop_ro("__cuda_array_interface__", &interface_of,
                   nb::sig("def __cuda_array_interface__(self) -> dict[str, object]"),
                   "Its bytes, for the libraries of arrays; it has been used on no stream.");
  nb::class_<NcclBackend>(module, "NcclBackend")
      .def(nb::new_([](int rank, int size, int device, bool may_gate, bool has_high_priority) {
             return std::make_shared<NcclBackend>(rank, size, device, may_gate, has_high_priority);
           }),
           "rank"_a, "size"_a, "device"_a, "may_gate"_a, "has_high_priority"_a)
      .def("load", &NcclBackend::load)
      .def("use", &NcclBackend::use, "device"_a)
      .def("on_first_call", &on_first_call, "load"_a,
           nb::sig("def on_first_call(self, load: collections.abc.Callable[[], NcclLibrary]) -> None"))
      .def_prop_ro("device", &NcclBackend::device)
      .def("on_connect", &on_connect, "connect"_a,
           nb::sig("def on_connect(self, connect: collections.abc.Callable[[int, int], "
                   "collections.abc.Iterator[int | collections.abc.Sequence[int] | None]]) -> None"))
      .def(
          "make_communicator",
          [](NcclBackend& self, int rank, int size, const nb::bytes& id, const nb::bytes& config) {
            return self.make_communicator(rank, size, id_of(id), std::string(config.c_str(), config.size()));
          },
          "rank"_a, "size"_a, "unique_id"_a, "config"_a)
      .def(
          "set_communicator",
          [](NcclBackend& self, int first, int second, std::shared_ptr<NcclCommunicator> communicator) {
            self.set_communicator({first, second}, std::move(communicator));
          },
          "first"_a, "second"_a, "communicator"_a)
      .def("close", &NcclBackend::close, "failed"_a, nb::call_guard<Unlocked>());
}
