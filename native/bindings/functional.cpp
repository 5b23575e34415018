// The functions of procgroup.functional on what is most often given to them: numbers, NumPy's arrays and scalars, and
// lists, tuples and dicts of these. All else is for src/procgroup/functional, which makes the same calls: other
// containers, arrays of other libraries or in another order, integers beside arrays, groups with a backend.
//
//     tree        walk: its leaves, in the order of trees.flatten
//     leaves      a Value for each: where its elements are, and a place for its results
//     call        FunctionalCall fuses the values of a dtype, as for XLA
//     results     the same tree, of what the places hold now
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <complex>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "python_group.hpp"
#include "xla/compiled_call.hpp"

namespace procgroup {
namespace {

// NumPy's names; null before a program has imported it: then it has no arrays.
struct NumPy {
  nb::handle array_type;
  nb::handle scalar_type;
  nb::handle as_array;
  nb::handle empty;
  nb::handle empty_like;

  static const NumPy& found() {
    static NumPy numpy;
    if (!numpy.array_type.is_valid()) {
      const nb::handle modules = PyImport_GetModuleDict();
      PyObject* const module = PyDict_GetItemString(modules.ptr(), "numpy");
      if (module != nullptr && nb::hasattr(module, "empty_like")) {
        const auto take = [&](const char* name) { return nb::object(nb::handle(module).attr(name)).release(); };
        numpy = {take("ndarray"), take("generic"), take("asarray"), take("empty"), take("empty_like")};
      }
    }
    return numpy;
  }
};

std::byte no_elements{};

// A leaf: a number or an array, and a place for its results.
class Value {
 public:
  // `takes` and `returns` are the lengths of the first dimension of the input and of the result, which has an element
  // per rank; 0 where there is no such dimension. Throws NotUsual for leaves that Python has to handle.
  Value(nb::handle given, size_t takes, size_t returns) {
    if (PyFloat_CheckExact(given.ptr())) {
      take_number(Dtype::kFloat64, PyFloat_AsDouble(given.ptr()), takes, returns);
    } else if (PyBool_Check(given.ptr())) {
      take_number(Dtype::kBool, given.is(nb::handle(Py_True)), takes, returns);
    } else if (PyLong_CheckExact(given.ptr())) {
      take_integer(given, takes, returns);
    } else if (PyComplex_CheckExact(given.ptr())) {
      const std::complex<double> number(PyComplex_RealAsDouble(given.ptr()), PyComplex_ImagAsDouble(given.ptr()));
      take_number(Dtype::kComplex128, number, takes, returns);
    } else {
      take_array(given, takes, returns);
    }
  }
  Value(Value&&) = default;

  struct NotUsual {};

  Dtype dtype() const { return dtype_; }
  bool is_integer() const { return kind_ == Kind::kInteger || kind_ == Kind::kBool; }
  FlatArray input() { return {kind_ == Kind::kArray ? input_ : number_.data(), dtype_, input_count_}; }
  FlatArray output() { return {kind_ == Kind::kArray ? output_ : results_.data(), dtype_, output_count_}; }

  // A new array, or a number; a list of numbers where there is one per rank.
  nb::object result() const {
    if (kind_ == Kind::kArray) return is_scalar_ ? nb::object(array_[nb::tuple()]) : array_;
    if (!returns_list_) return number_at(0);
    nb::list numbers;
    for (size_t index = 0; index < output_count_; ++index) numbers.append(number_at(index));
    return numbers;
  }

 private:
  // Elements of an array that NumPy copies in less time than it makes an empty one like it.
  static constexpr size_t kCopied = 256;

  enum class Kind { kArray, kFloat, kComplex, kInteger, kBool };

  template <class Number>
  void take_number(Dtype dtype, Number number, size_t takes, size_t returns) {
    if (takes != 0) throw NotUsual();
    kind_ = dtype == Dtype::kFloat64      ? Kind::kFloat
            : dtype == Dtype::kComplex128 ? Kind::kComplex
            : dtype == Dtype::kInt64      ? Kind::kInteger
                                          : Kind::kBool;
    dtype_ = dtype;
    std::memcpy(number_.data(), &number, sizeof number);
    returns_list_ = returns != 0;
    output_count_ = returns_list_ ? returns : 1;
    results_.resize(output_count_ * sizeof(Number));
  }

  void take_integer(nb::handle given, size_t takes, size_t returns) {
    const long long number = PyLong_AsLongLong(given.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      throw NotUsual();
    }
    take_number(Dtype::kInt64, static_cast<int64_t>(number), takes, returns);
  }

  void take_array(nb::handle given, size_t takes, size_t returns) {
    const NumPy& numpy = NumPy::found();
    if (!numpy.array_type.is_valid()) throw NotUsual();
    const bool is_array = given.type().ptr() == numpy.array_type.ptr();
    is_scalar_ = !is_array && PyObject_IsInstance(given.ptr(), numpy.scalar_type.ptr()) == 1;
    if (!is_array && !is_scalar_) throw NotUsual();
    owner_ = is_scalar_ ? numpy.as_array(given) : nb::borrow(given);
    try {
      const ArrayView& view = given_view_.emplace(owner_, Access::kRead, ParameterName{"tree"});
      if (view.has_scratch()) throw NotUsual();
      dtype_ = view.dtype();
      input_count_ = view.count();
      input_ = input_count_ == 0 ? &no_elements : view.data();
      if (takes != 0 && view.rows() != takes) throw NotUsual();
    } catch (nb::python_error&) {  // its dtype cannot be sent: Python's error names the leaf
      throw NotUsual();
    } catch (nb::builtin_exception&) {
      throw NotUsual();
    }
    const auto shape = [&] { return nb::tuple(owner_.attr("shape")); };
    if (takes != 0 && shape().size() == 0) throw NotUsual();
    if (returns != 0 && takes == 0)
      array_ = numpy.empty(nb::make_tuple(returns) + shape(), owner_.attr("dtype"));
    else if (takes != 0 && returns == 0)
      array_ = numpy.empty(nb::steal(PyTuple_GetSlice(shape().ptr(), 1, PY_SSIZE_T_MAX)), owner_.attr("dtype"));
    else
      array_ = input_count_ <= kCopied ? owner_.attr("copy")() : numpy.empty_like(owner_);
    const ArrayView& view = result_view_.emplace(array_, Access::kWrite, ParameterName{"tree"});
    output_count_ = view.count();
    output_ = output_count_ == 0 ? &no_elements : view.data();
  }

  template <class Number>
  Number as(size_t index) const {
    Number number;
    std::memcpy(&number, results_.data() + index * sizeof number, sizeof number);
    return number;
  }

  nb::object number_at(size_t index) const {
    switch (kind_) {
      case Kind::kFloat:
        return nb::float_(as<double>(index));
      case Kind::kComplex: {
        const auto number = as<std::complex<double>>(index);
        return nb::steal(PyComplex_FromDoubles(number.real(), number.imag()));
      }
      case Kind::kBool:
        return nb::bool_(as<bool>(index));
      default:
        return nb::int_(as<int64_t>(index));
    }
  }

  Kind kind_ = Kind::kArray;
  bool is_scalar_ = false;  // of NumPy
  bool returns_list_ = false;
  Dtype dtype_;
  std::array<std::byte, 16> number_{};
  std::vector<std::byte> results_;  // of a number
  nb::object owner_;
  nb::object array_;
  std::optional<ArrayView> given_view_;  // while it is there, no other thread can move the array's memory
  std::optional<ArrayView> result_view_;
  void* input_ = nullptr;
  void* output_ = nullptr;
  size_t input_count_ = 1;
  size_t output_count_ = 1;
};

// Lists, tuples and dicts, and what is in them. Throws Value::NotUsual for dicts with other keys than texts, and for
// texts whose place in the order of trees.flatten, that of repr, is not plain.
class Tree {
 public:
  static void collect(nb::handle tree, std::vector<nb::handle>& leaves, int depth = 0) {
    if (depth > kDepth) throw Value::NotUsual();
    if (tree.is_none()) return;
    if (PyTuple_CheckExact(tree.ptr()) || PyList_CheckExact(tree.ptr())) {
      for (const nb::handle child : tree) collect(child, leaves, depth + 1);
    } else if (PyDict_CheckExact(tree.ptr())) {
      for (const auto& [key, child] : sorted(tree)) collect(child, leaves, depth + 1);
    } else {
      leaves.push_back(tree);
    }
  }

  // The tree with these values as its leaves. Another thread may have changed it during the call: that is an error.
  static nb::object rebuild_all(nb::handle tree, std::span<const Value> values) {
    nb::object made;
    try {
      made = rebuild(tree, values);
    } catch (const Value::NotUsual&) {
      refuse_change();
    }
    if (!values.empty()) refuse_change();
    return made;
  }

 private:
  // Lists in lists, and so on: a list may be a part of itself.
  static constexpr int kDepth = 50;

  // Takes the first of `values` for each leaf.
  static nb::object rebuild(nb::handle tree, std::span<const Value>& values, int depth = 0) {
    if (depth > kDepth) refuse_change();
    if (tree.is_none()) return nb::none();
    if (PyTuple_CheckExact(tree.ptr()) || PyList_CheckExact(tree.ptr())) {
      nb::list made;
      for (const nb::handle child : tree) made.append(rebuild(child, values, depth + 1));
      return PyTuple_CheckExact(tree.ptr()) ? nb::object(nb::tuple(made)) : nb::object(made);
    }
    if (PyDict_CheckExact(tree.ptr())) {
      const nb::object made = nb::steal(PyDict_Copy(tree.ptr()));  // which has the order of the keys
      for (const auto& [key, child] : sorted(tree)) made[nb::handle(key)] = rebuild(child, values, depth + 1);
      return made;
    }
    if (values.empty()) refuse_change();
    nb::object result = values.front().result();
    values = values.subspan(1);
    return result;
  }

  [[noreturn]] static void refuse_change() {
    throw std::runtime_error("`tree` was changed by another thread during the call, and its results have no place");
  }

  struct Entry {
    nb::object key;
    nb::object value;
    std::string text;
  };

  static std::vector<std::pair<nb::object, nb::object>> sorted(nb::handle dict) {
    std::vector<Entry> entries;
    for (const auto [key, value] : nb::borrow<nb::dict>(dict)) {
      if (!PyUnicode_CheckExact(key.ptr())) throw Value::NotUsual();
      Py_ssize_t size = 0;
      const char* const text = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
      if (text == nullptr) throw nb::python_error();
      entries.push_back({nb::borrow(key), nb::borrow(value), {text, static_cast<size_t>(size)}});
      // Those that Python's repr writes as they are, between quotes of this kind.
      const auto is_usual = [](char one) { return one >= ' ' && one < 0x7f && one != '\'' && one != '\\'; };
      std::string& written = entries.back().text;
      if (!std::ranges::all_of(written, is_usual)) throw Value::NotUsual();
      written += '\'';
    }
    std::ranges::sort(entries, {}, &Entry::text);
    std::vector<std::pair<nb::object, nb::object>> found;
    for (Entry& entry : entries) found.emplace_back(std::move(entry.key), std::move(entry.value));
    return found;
  }
};

}  // namespace

// Python's integers do not overflow: every rank gets those of all ranks, and `combine` combines them.
nb::object PythonGroup::reduce_integer(nb::handle number, nb::handle op, nb::handle combine) {
  const Reduction reduction = site("all_reduce").reduction(op, Dtype::kInt64);
  Value value(number, 0, static_cast<size_t>(group_->size()));
  Request request;
  request.descriptor.op = OpKind::kAllGather;
  request.descriptor.dtype = value.dtype();
  request.descriptor.count = 1;
  request.descriptor.of_integers = true;
  request.descriptor.reduce_op = reduction.op;
  request.source = engine_->source_line();
  request.input = value.input().data;
  auto* const results = static_cast<std::byte*>(value.output().data);
  for (size_t rank = 0; rank < static_cast<size_t>(group_->size()); ++rank)
    request.outputs.push_back({results + rank * dtype_size(value.dtype()), 1});
  run(request, seconds_in_force());
  return combine(op, value.result());
}

nb::object PythonGroup::functional(const char* name, nb::handle tree, int root, int source, nb::handle op,
                                   nb::handle combine, uint64_t tag) {
  const auto not_usual = [] { return nb::borrow(Py_NotImplemented); };
  if (only_checks_ || is_intercepted() || !runs_compiled() || inside_transfer()) return not_usual();
  FunctionalCall call{.op = op_from_name(name), .root = root, .source = source, .tag = tag};
  const auto size = static_cast<size_t>(group_->size());
  const size_t takes = has_input_blocks(call.op) ? size : 0;
  const size_t returns = has_output_blocks(call.op) ? size : 0;
  std::vector<nb::handle> leaves;
  std::vector<Value> values;
  try {
    Tree::collect(tree, leaves);
    if (leaves.empty()) return not_usual();
    values.reserve(leaves.size());
    const bool is_alone = leaves.size() == 1;
    for (const nb::handle leaf : leaves) {
      Value& value = values.emplace_back(leaf, takes, returns);
      if (!value.is_integer() || (is_alone && !reduces(call.op))) continue;
      const bool is_op_of_integers = PyLong_Check(op.ptr()) && call.op == OpKind::kAllReduce;
      if (!is_alone || !is_op_of_integers || tree.ptr() != leaf.ptr()) return not_usual();
      return reduce_integer(leaf, op, combine);
    }
  } catch (const Value::NotUsual&) {
    return not_usual();
  }
  FlatArrays given, results;
  bool are_alike = true;
  for (Value& value : values) {
    if (reduces(call.op)) {
      const Reduction reduction = site(name).reduction(op, value.dtype());
      call.reduce_op = reduction.op;
      call.factor = reduction.factor;
    }
    given.push_back(value.input());
    results.push_back(value.output());
    are_alike = are_alike && value.dtype() == given.front().dtype;
  }
  call.line = engine_->source_line();
  PythonRuntime language(engine_->rank_threads());
  try {
    if (are_alike) {
      HostDevice device(*group_, seconds_in_force(), language);
      call.run(device, given, results);
    } else {
      std::vector<Dtype> dtypes;
      for (const FlatArray& array : given) dtypes.push_back(array.dtype);
      CompiledCall(call, dtypes).run(*group_, given, results, seconds_in_force(), language);
    }
    language.rethrow();
  } catch (const OperationFailed& failed) {
    language.rethrow();
    raise(build_exception(failed.failure, failed.call, *group_));
  }
  return Tree::rebuild_all(tree, values);
}

nb::object PythonGroup::try_sendrecv(nb::handle tree, nb::handle dst, nb::handle src, uint64_t tag) {
  const nb::int_ any_tag(0);
  const std::optional<Message> to = ordinary_message(dst, any_tag);
  const std::optional<Message> from = ordinary_message(src, any_tag);
  const auto is_here = [&](const std::optional<Message>& one) { return one->peer == group_->rank(); };
  if (!to || !from || is_here(to) != is_here(from)) return nb::borrow(Py_NotImplemented);
  return functional("send", tree, to->peer, from->peer, nb::none(), nb::none(), tag);
}

}  // namespace procgroup
