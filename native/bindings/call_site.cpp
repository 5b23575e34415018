// Error texts for arguments.
#include <nanobind/stl/string.h>

#include "arguments.hpp"

namespace procgroup {

std::string CallSite::sentence(const std::string& text) const {
  return std::string(function_) + " on " + rank_name(group_.rank(), &group_.members().global_ranks()) + ": " + text;
}

void CallSite::refuse(const std::string& text) const {
  raise(nb::module_::import_("procgroup.errors").attr("ArgumentError")(sentence(text)));
}

void CallSite::refuse_value(const std::string& text) const { throw nb::value_error(sentence(text).c_str()); }

void CallSite::refuse_type(const std::string& text) const { throw nb::type_error(sentence(text).c_str()); }

void CallSite::require_checked(bool is_right, const char* name) const {
  if (!is_right) refuse("`" + std::string(name) + "` is wrong, and was not checked");
}

int CallSite::checked_rank(int rank) const {
  require_checked(rank >= 0 && rank < group_.size(), "rank");
  return rank;
}

int CallSite::checked_peer(int peer, const std::string& side) const {
  if (checked_rank(peer) != group_.rank()) return peer;
  throw nb::value_error(
      ("Invalid " + side + " rank: " + side +
       " rank should not be the same as the rank of the current process. Copy the array instead, or " +
       "use functional.sendrecv, in which a rank may be its own source and destination.")
          .c_str());
}

void CallSite::require_one_place(const ArrayView& first, const ArrayView& other) const {
  const auto place = [](const ArrayView& view) {
    return view.is_on_device() ? "GPU " + std::to_string(view.device()) : std::string("the CPU");
  };
  if (first.is_on_device() == other.is_on_device() && (!first.is_on_device() || first.device() == other.device()))
    return;
  refuse("expected arrays on one device, got some on " + place(first) + " and some on " + place(other) +
         "; move them to one of these");
}

Reduction CallSite::reduction(nb::handle op, Dtype dtype) const {
  Reduction chosen{ReduceOp::kPremulSum};
  if (PyLong_Check(op.ptr())) {
    const long number = PyLong_AsLong(op.ptr());
    require_checked(number >= 0 && number < kReduceOps, "op");
    chosen.op = static_cast<ReduceOp>(number);
    if (chosen.op == ReduceOp::kPremulSum)
      refuse_type("ReduceOp.PREMUL_SUM needs a factor; pass ReduceOp.PREMUL_SUM(factor) as `op`");
  } else {
    chosen.factor = PyFloat_AsDouble(nb::object(op.attr("factor")).ptr());
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
  }
  if (supports(chosen.op, dtype)) return chosen;
  const std::string what = std::string("ReduceOp.") + reduce_op_name(chosen.op);
  if (!supports(ReduceOp::kSum, dtype))
    refuse_type(std::string(dtype_name(dtype)) + " arrays can be moved, not reduced; convert them to float16 or wider");
  if (dtype == Dtype::kComplex64 || dtype == Dtype::kComplex128)
    refuse_value(std::string(function_) + " does not support " + what + " on complex tensors");
  refuse(what + " is not defined for " + dtype_name(dtype) + " arrays; use another op or convert the array");
}

}  // namespace procgroup
