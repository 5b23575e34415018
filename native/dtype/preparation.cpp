#include "dtype/preparation.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>

#define PROCGROUP_KERNELS preparing
#include "dtype/elements.hpp"

namespace procgroup {
namespace {

template <class Element>
void scale_as(double factor, void* out, const void* elements, size_t count) {
  using Slot = preparing::Unaligned<typename Element::Storage>;
  auto* to = static_cast<Slot*>(out);
  const auto* from = static_cast<const Slot*>(elements);
  const auto by = static_cast<typename Element::Accumulator>(factor);
  for (size_t index = 0; index < count; ++index)
    to[index].value = Element::store(Element::load(from[index].value) * by);
}

void scale(Dtype dtype, double factor, void* out, const void* elements, size_t count) {
  switch (dtype) {
    case Dtype::kFloat16:
      return scale_as<preparing::Float16>(factor, out, elements, count);
    case Dtype::kBfloat16:
      return scale_as<preparing::Bfloat16>(factor, out, elements, count);
    case Dtype::kFloat32:
      return scale_as<preparing::Plain<float>>(factor, out, elements, count);
    case Dtype::kFloat64:
      return scale_as<preparing::Plain<double>>(factor, out, elements, count);
    case Dtype::kComplex64:
      return scale_as<preparing::Plain<float>>(factor, out, elements, 2 * count);
    case Dtype::kComplex128:
      return scale_as<preparing::Plain<double>>(factor, out, elements, 2 * count);
    default:
      throw std::invalid_argument(std::string("PREMUL_SUM is not defined for ") + dtype_name(dtype));
  }
}

template <class T>
void make_truth_as(void* out, const void* elements, size_t count) {
  using Slot = preparing::Unaligned<T>;
  auto* to = static_cast<Slot*>(out);
  const auto* from = static_cast<const Slot*>(elements);
  for (size_t index = 0; index < count; ++index) to[index].value = from[index].value != 0;
}

// Of integers: those of one width have the same bits for 0 and 1.
void make_truth(Dtype dtype, void* out, const void* elements, size_t count) {
  switch (dtype_size(dtype)) {
    case 1:
      return make_truth_as<uint8_t>(out, elements, count);
    case 2:
      return make_truth_as<uint16_t>(out, elements, count);
    case 4:
      return make_truth_as<uint32_t>(out, elements, count);
    default:
      return make_truth_as<uint64_t>(out, elements, count);
  }
}

}  // namespace

void prepare(ReduceOp op, Dtype dtype, double factor, void* out, const void* elements, size_t count) {
  switch (row_of(op).preparation) {
    case Preparation::kFactor:
      return scale(dtype, factor, out, elements, count);
    case Preparation::kTruth:
      return make_truth(dtype, out, elements, count);
    case Preparation::kNone:
      throw std::invalid_argument(std::string(reduce_op_name(op)) + " prepares no elements");
  }
}

}  // namespace procgroup
