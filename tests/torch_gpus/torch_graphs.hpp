// CUDA graphs of torch's device on stand-in GPUs: torch.cuda.CUDAGraph, and operations that are captured.
//
// At its capture an operation runs once on the host, for the shapes of its results, and changes nothing that is outside
// of the graph; where it fails on values that are not there yet, it runs on torch's device "meta". Each launch runs it
// on the same memory, when its stream gets there:
//
//      mul(a, b) in a capture ──> memory for the result | node: a thread of the stream runs the CPU kernel on a, b
//
// A graph has a *pool*: the memory that tensors get on a stream of its capture. It is unused by others until the graph
// and these tensors are gone, also when a tensor is dropped in the capture. After the capture it holds a pattern, since
// no operation has run yet. Tensors from before the capture belong to the program: a launch after their end is a fault.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "../nccl/cuda_device.hpp"
#include "torch_driver.hpp"

std::shared_ptr<stand_in::Allocation> stand_in_find_memory(const void* address);
bool stand_in_capture(void* stream, const stand_in::Graph::Make& make);
void stand_in_fault();

namespace stand_in_torch {

struct Pool {
  explicit Pool(c10::DeviceIndex device) : device(device) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  // In a thread, because the driver waits for the device, and who drops a graph does not.
  ~Pool() {
    std::thread([device = device, dropped = std::move(dropped)] {
      const On on(device);
      const BesideCaptures beside;
      for (const uintptr_t address : dropped) cuMemFree(address);
    }).detach();
  }

  const c10::DeviceIndex device;
  std::mutex mutex{};
  std::set<uintptr_t> memory{};
  std::vector<uintptr_t> dropped{};  // of tensors that are gone
};

struct Capture {
  std::shared_ptr<Pool> pool;
  std::vector<std::function<void()>> afterwards{};  // guarded by the mutex of the pool
};

inline std::mutex captures_mutex;
inline std::atomic<int> capture_count = 0;
inline std::map<uint64_t, std::shared_ptr<Capture>>& captures() {
  static auto* const all = new std::map<uint64_t, std::shared_ptr<Capture>>;
  return *all;
}

// The capture of CUDAGraph in which a stream is; or nothing.
inline std::shared_ptr<Capture> capture_of(Handle stream) {
  if (capture_count == 0 || stream == nullptr) return nullptr;
  int status = 0;
  uint64_t id = 0;
  CHECKED(cuStreamGetCaptureInfo(stream, &status, &id, nullptr, nullptr, nullptr));
  if (status == 0) return nullptr;
  const std::lock_guard lock(captures_mutex);
  const auto found = captures().find(id);
  return found == captures().end() ? nullptr : found->second;
}

inline bool is_of(Pool& pool, const at::Tensor& tensor) {
  const std::lock_guard lock(pool.mutex);
  return pool.memory.count(reinterpret_cast<uintptr_t>(tensor.storage().data())) != 0;
}

// --- operations ---

// The memory that a node uses, to find that it was freed.
using Used = std::vector<std::weak_ptr<stand_in::Allocation>>;

// A tensor of the host over the memory of a GPU's.
inline at::Tensor over(const at::Tensor& tensor, Used& used) {
  const auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  const void* const address = tensor.data_ptr();
  const auto allocation = stand_in_find_memory(address);
  TORCH_CHECK(allocation != nullptr, "stand-in GPU: an operation in a capture has a tensor whose memory is freed");
  used.push_back(allocation);
  auto* const bytes = allocation->at(reinterpret_cast<uintptr_t>(address));
  const at::Tensor made = at::from_blob(bytes, tensor.sizes(), tensor.strides(), options);
  made._set_neg(tensor.is_neg());
  made._set_conj(tensor.is_conj());
  return made;
}

inline void add_node(Handle stream, Used used, std::function<void()> work) {
  const auto run = [used = std::move(used), work = std::move(work)] {
    std::vector<std::shared_ptr<stand_in::Allocation>> held;
    for (const auto& each : used) held.push_back(each.lock());
    if (std::find(held.begin(), held.end(), nullptr) != held.end()) return stand_in_fault();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "stand-in GPU: an operation of a graph has failed: %s\n", error.what());
      stand_in_fault();
    }
  };
  TORCH_CHECK(stand_in_capture(stream, [run] { return run; }), "stand-in GPU: the stream is in no capture");
}

template <class Change>
c10::IValue with_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector()) made.push_back(change(each));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      made.push_back(each && each->defined() ? std::optional(change(*each)) : each);
    return made;
  }
  return value;
}

inline std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  std::vector<at::Tensor> found;
  with_tensors(value, [&](const at::Tensor& each) { return found.push_back(each), each; });
  return found;
}

// As on a GPU: an operation whose result, or its shape, the host needs.
inline void refuse_to_wait(const c10::OperatorHandle& op, Handle stream) {
  bool waits = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  for (const auto& result : op.schema().returns()) {
    const auto kind = result.type()->kind();
    waits = waits || (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType);
  }
  if (waits) CHECKED(cuStreamSynchronize(stream));
}

// Capture an operation. It writes the arguments of which its schema says so, and those with the numbers of `written`.
inline void capture(const c10::OperatorHandle& op, torch::jit::Stack* stack, Capture& capture, Handle stream,
                    const std::set<size_t>& written = {}) {
  refuse_to_wait(op, stream);
  const auto& schema = op.schema();
  const std::vector<c10::IValue> given = torch::jit::last(*stack, schema.arguments().size()).vec();
  torch::jit::drop(*stack, given.size());
  const c10::Device device(c10::kCUDA, current_device);
  const auto is_written = [&](size_t index) {
    const auto* const alias = schema.arguments()[index].alias_info();
    return written.count(index) != 0 || (alias != nullptr && alias->isWrite());
  };
  Used unused;
  const auto to_host = [](const c10::IValue& value, auto change) -> c10::IValue {
    if (value.isDevice()) return c10::Device(c10::kCPU);
    return with_tensors(value, [&](const at::Tensor& each) {
      if (!each.defined()) return each;
      return each.is_cuda() ? change(each) : each.clone();  // what is on the host now is part of the graph
    });
  };

  torch::jit::Stack now;
  std::vector<std::vector<at::Tensor>> tried(given.size());
  const auto try_on = [&](c10::DispatchKey key, auto change) {
    now.clear();
    for (size_t index = 0; index < given.size(); ++index) {
      now.push_back(to_host(given[index], [&](const at::Tensor& each) { return change(each, is_written(index)); }));
      if (is_written(index)) tried[index] = tensors_of(now.back());
    }
    op.redispatchBoxed(c10::DispatchKeySet(key), &now);
  };
  try {
    try_on(c10::DispatchKey::CPU, [&](const at::Tensor& each, bool is_written) {
      return is_written ? over(each, unused).clone() : over(each, unused);
    });
  } catch (const c10::Error&) {  // of a value that no kernel has computed yet, such as an index
    try_on(c10::DispatchKey::Meta, [](const at::Tensor& each, bool) {
      return at::empty_strided(each.sizes(), each.strides(), each.options().device(at::kMeta));
    });
  }

  for (size_t index = 0; index < given.size(); ++index) {
    const auto tensors = tensors_of(given[index]);
    for (size_t place = 0; place < tried[index].size(); ++place) {
      const at::Tensor& tensor = tensors[place];
      if (!tensor.defined() || !tensor.is_cuda()) continue;
      if (tensor.sizes() != tried[index][place].sizes()) tensor.resize_(tried[index][place].sizes());
      if (tried[index][place].is_meta() || !is_of(*capture.pool, tensor)) continue;
      over(tensor, unused).copy_(tried[index][place]);
    }
  }
  Used used;
  torch::jit::Stack at_launch;
  for (const c10::IValue& each : given)
    at_launch.push_back(to_host(each, [&](const at::Tensor& tensor) { return over(tensor, used); }));

  std::vector<at::Tensor> made;      // the results that are no arguments
  std::vector<size_t> made_results;  // their places among the results
  for (size_t index = 0; index < now.size(); ++index) {
    const auto* const alias = schema.returns()[index].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t argument = 0; argument < given.size(); ++argument) {
        const auto* const other = schema.arguments()[argument].alias_info();
        if (other != nullptr && *other == *alias) stack->push_back(given[argument]);
      }
      continue;
    }
    made_results.push_back(index);
    stack->push_back(with_tensors(now[index], [&](const at::Tensor& each) {
      if (!each.defined()) return each;
      const at::Tensor result = at::empty_strided(each.sizes(), each.strides(), each.options().device(device));
      made.push_back(over(result, used));
      if (!each.is_meta()) made.back().copy_(each);
      return result;
    }));
  }
  add_node(stream, std::move(used), [op, at_launch, made, made_results] {
    torch::jit::Stack results = at_launch;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
    auto next = made.begin();
    for (const size_t index : made_results)
      for (const at::Tensor& each : tensors_of(results[index]))
        if (each.defined()) (next++)->copy_(each);
  });
}

// Capture a copy between two tensors of the current device.
inline void capture_copy(const at::Tensor& to, const at::Tensor& from, Capture& capture, Handle stream) {
  Used used;
  const at::Tensor target = over(to, used), source = over(from, used);
  if (is_of(*capture.pool, to)) target.copy_(source);
  add_node(stream, std::move(used), [target, source] { target.copy_(source); });
}

// --- torch.cuda.CUDAGraph ---

struct Graph {
  c10::DeviceIndex device;
  Handle stream;
  uint64_t id = 0;
  std::shared_ptr<Pool> pool;
  Handle made = nullptr;
};

inline std::mutex graphs_mutex;
inline std::map<int64_t, Graph>& graphs() {
  static auto* const all = new std::map<int64_t, Graph>;
  return *all;
}
inline Graph graph_of(int64_t number) {
  const std::lock_guard lock(graphs_mutex);
  return graphs().at(number);
}

inline int64_t begin_capture(int64_t mode) {
  make_current(current_device);
  Graph graph{.device = current_device, .stream = current_stream(), .pool = std::make_shared<Pool>(current_device)};
  TORCH_CHECK(graph.stream != nullptr, "CUDA graphs must be captured on a non-default stream.");
  CHECKED(cuStreamBeginCapture(graph.stream, static_cast<int>(mode)));
  int status = 0;
  CHECKED(cuStreamGetCaptureInfo(graph.stream, &status, &graph.id, nullptr, nullptr, nullptr));
  {
    const std::lock_guard lock(captures_mutex);
    captures()[graph.id] = std::make_shared<Capture>(graph.pool);
    ++capture_count;
  }
  const std::lock_guard lock(graphs_mutex);
  static int64_t numbers = 0;
  graphs()[++numbers] = graph;
  return numbers;
}

inline void end_capture(int64_t number) {
  const Graph graph = graph_of(number);
  const On on(graph.device);
  Handle taken = nullptr, made = nullptr;
  const int result = cuStreamEndCapture(graph.stream, &taken);
  std::shared_ptr<Capture> capture;
  {
    const std::lock_guard lock(captures_mutex);
    capture = captures().extract(graph.id).mapped();
    --capture_count;
  }
  for (const auto& each : capture->afterwards) each();
  for (const uintptr_t address : graph.pool->memory) {
    const auto allocation = stand_in_find_memory(reinterpret_cast<void*>(address));
    std::memset(allocation->at(address), 0xA5, allocation->bytes);
  }
  check(result, "cuStreamEndCapture");
  CHECKED(cuGraphInstantiateWithFlags(&made, taken, 0));
  CHECKED(cuGraphDestroy(taken));
  const std::lock_guard lock(graphs_mutex);
  graphs().at(number).made = made;
}

inline void replay(int64_t number) {
  const Graph graph = graph_of(number);
  TORCH_CHECK(graph.made != nullptr, "Called CUDAGraph::replay without a preceding successful capture.");
  const On on(graph.device);
  CHECKED(cuGraphLaunch(graph.made, current_stream()));
}

inline void reset(int64_t number) {
  std::unique_lock lock(graphs_mutex);
  const Graph graph = graphs().extract(number).mapped();
  lock.unlock();
  if (graph.made != nullptr) cuGraphExecDestroy(graph.made);
}

}  // namespace stand_in_torch
