#include "staged_call.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <utility>

namespace nb = nanobind;

namespace procgroup {
namespace {

nb::list spans(const std::vector<Block>& blocks, Dtype dtype) {
  nb::list list;
  for (const Block& block : blocks)
    list.append(nb::make_tuple(reinterpret_cast<uintptr_t>(block.data), block.count * dtype_size(dtype)));
  return list;
}

std::vector<void*> addresses(const nb::object& copies, const char* name) {
  std::vector<void*> pointers;
  for (const uintptr_t address : nb::cast<std::vector<uintptr_t>>(copies.attr(name)))
    pointers.push_back(reinterpret_cast<void*>(address));
  return pointers;
}

nb::object begin(const nb::list& arrays, int device, Dtype dtype, const std::vector<Block>& inputs,
                 const std::vector<Block>& outputs, double seconds) {
  return nb::module_::import_("procgroup.backends.staging")
      .attr("StagedCall")(device, spans(inputs, dtype), spans(outputs, dtype), arrays, seconds);
}

}  // namespace

std::shared_ptr<BackendTransfer> stage(Request& request, const std::vector<ArrayView>& arrays, int rank,
                                       double seconds) {
  const Descriptor& call = request.descriptor;
  nb::list objects;
  for (const ArrayView& array : arrays) objects.append(array.array());
  nb::object copies =
      begin(objects, arrays.front().device(), call.dtype, inputs_of(request, rank), outputs_of(request, rank), seconds);
  const std::vector<void*> read = addresses(copies, "inputs");
  const std::vector<void*> written = addresses(copies, "outputs");
  const bool is_in_place = request.input != nullptr && request.input == request.output;
  for (size_t index = 0; index < request.inputs.size(); ++index) request.inputs[index].data = read.at(index);
  for (size_t index = 0; index < request.outputs.size(); ++index) request.outputs[index].data = written.at(index);
  if (!has_input_blocks(call.op)) request.input = read.empty() ? nullptr : read[0];
  if (!has_output_blocks(call.op)) request.output = written.empty() ? nullptr : written[0];
  if (is_in_place && read.empty()) request.input = request.output;
  if (is_in_place && written.empty()) request.output = const_cast<void*>(request.input);
  std::shared_ptr<BackendTransfer> staged = make_staged_transfer(std::move(copies));
  request.ready = [staged] { return staged->is_copied(); };
  request.before = [staged] {};  // keeps the host memory alive with the request
  return staged;
}

std::shared_ptr<BackendTransfer> stage(MessageRequest& request, const ArrayView& array, double seconds) {
  nb::list objects;
  objects.append(array.array());
  const std::vector<Block> blocks{{request.data, request.count}};
  const bool sends = request.op == OpKind::kSend;
  nb::object copies = begin(objects, array.device(), request.dtype, sends ? blocks : std::vector<Block>{},
                            sends ? std::vector<Block>{} : blocks, seconds);
  request.data = addresses(copies, sends ? "inputs" : "outputs").at(0);
  if (sends) copies.attr("wait_until_copied")();
  return make_staged_transfer(std::move(copies));
}

}  // namespace procgroup
