// The store for the threads of one process as a Python object.
#include "store/in_process_store.hpp"

#include <type_traits>

#include "bindings/python_host.hpp"
#include "bindings/stores/requests.hpp"
#include "bindings/stores/stores.hpp"

namespace nb = nanobind;

namespace procgroup::store {
namespace {

class PythonInProcessStore final : public StoreRequests {
 public:
  PythonInProcessStore() : store_(std::make_unique<InProcessStore>()) {}

  PythonInProcessStore* clone() const {
    return guarded([&](const Check&) { return new PythonInProcessStore(store_->clone()); });
  }
  void close() { store_->close(); }

 private:
  explicit PythonInProcessStore(std::unique_ptr<InProcessStore> store) : store_(std::move(store)) {}

  Reply request(Op op, std::string_view head, std::string_view tail, double seconds) override {
    return guarded(
        [&](const Check& check) { return store_->request(op, head, tail, Deadline::after(seconds), check); });
  }

  // Call the function without the interpreter's lock, and raise what goes wrong with the lock. The function calls the
  // check, which runs the handlers of signals, time and again while it waits.
  template <class Function>
  static std::invoke_result_t<Function, const Check&> guarded(Function&& function) {
    try {
      Unlocked unlocked;
      return function([&unlocked] { unlocked.check_signals(); });
    } catch (const ForkedStore&) {
      raise_error("ForkedProcessError", std::string("a HashStore"));
    } catch (const ClosedStore&) {
      raise_error("DistStoreError", std::string("this HashStore was closed"));
    }
  }

  const std::unique_ptr<InProcessStore> store_;
};

}  // namespace

void bind_in_process_store(nb::module_& module) {
  nb::class_<PythonInProcessStore, StoreRequests>(module, "InProcessStore")
      .def(nb::init<>())
      .def("clone", &PythonInProcessStore::clone)
      .def("close", &PythonInProcessStore::close);
}

}  // namespace procgroup::store
