#include "dtype/scale.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>

#define PROCGROUP_KERNELS scaling
#include "dtype/elements.hpp"

namespace procgroup {
namespace {

template <class Element>
void scale_as(void* out, const void* elements, double factor, size_t count) {
  using Slot = scaling::Unaligned<typename Element::Storage>;
  auto* to = static_cast<Slot*>(out);
  const auto* from = static_cast<const Slot*>(elements);
  const auto by = static_cast<typename Element::Accumulator>(factor);
  for (size_t index = 0; index < count; ++index)
    to[index].value = Element::store(Element::load(from[index].value) * by);
}

}  // namespace

void scale(Dtype dtype, void* out, const void* elements, double factor, size_t count) {
  switch (dtype) {
    case Dtype::kFloat16:
      return scale_as<scaling::Float16>(out, elements, factor, count);
    case Dtype::kBfloat16:
      return scale_as<scaling::Bfloat16>(out, elements, factor, count);
    case Dtype::kFloat32:
      return scale_as<scaling::Plain<float>>(out, elements, factor, count);
    case Dtype::kFloat64:
      return scale_as<scaling::Plain<double>>(out, elements, factor, count);
    case Dtype::kComplex64:
      return scale_as<scaling::Plain<float>>(out, elements, factor, 2 * count);
    case Dtype::kComplex128:
      return scale_as<scaling::Plain<double>>(out, elements, factor, 2 * count);
    default:
      throw std::invalid_argument(std::string("PREMUL_SUM is not defined for ") + dtype_name(dtype));
  }
}

}  // namespace procgroup
