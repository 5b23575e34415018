#include "collectives/network_executor.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace procgroup {
namespace {

// Transfers that run at once. Enough to keep every link busy; few enough to compare each step with all.
constexpr size_t kMaxFlights = 32;

using Kind = NetworkStep::Kind;

}  // namespace

NetworkExecutor::NetworkExecutor(Messages& messages, const GroupView& group, const Request& request, MessageKey key,
                                 NetworkSchedule schedule)
    : messages_(messages),
      group_(group),
      request_(request),
      key_(key),
      schedule_(std::move(schedule)),
      scratch_(std::make_unique_for_overwrite<std::byte[]>(bytes_of(schedule_.scratch_elements))),
      sources_(group.members.size()) {}

NetworkExecutor::~NetworkExecutor() {
  Failure aborted{};
  aborted.kind = Failure::Kind::kAborted;
  for (const Flight& flight : flights_) {
    if (!flight.transfer->is_completed()) messages_.cancel(*flight.transfer, aborted);
  }
}

Progress NetworkExecutor::advance() {
  const size_t before = next_;
  const size_t flying = flights_.size();
  land();
  const bool landed = flights_.size() < flying;
  while (!failure_ && next_ < schedule_.steps.size()) {
    const NetworkStep& step = schedule_.steps[next_];
    if (flights_.size() >= kMaxFlights || must_wait(step)) break;
    step.kind == Kind::kSend || step.kind == Kind::kReceive ? launch(step) : compute(step);
    ++next_;
    land();
  }
  if (failure_ || (next_ == schedule_.steps.size() && flights_.empty())) return Progress::kDone;
  return landed || next_ > before ? Progress::kMoved : Progress::kWaiting;
}

void NetworkExecutor::land() {
  std::erase_if(flights_, [&](const Flight& flight) {
    if (!flight.transfer->is_completed()) return false;
    if (flight.transfer->failure() != nullptr && !failure_) failure_ = *flight.transfer->failure();
    return true;
  });
}

// Whether a running transfer writes what the step touches, or reads what it writes.
bool NetworkExecutor::must_wait(const NetworkStep& step) const {
  const auto overlap = [](const Memory& left, const Memory& right) {
    return left.begin < right.begin + right.bytes && right.begin < left.begin + left.bytes;
  };
  const Memory written = written_by(step);
  const std::array<Memory, 2> read = read_by(step);
  return std::ranges::any_of(flights_, [&](const Flight& flight) {
    const bool reads = overlap(flight.memory, read[0]) || overlap(flight.memory, read[1]);
    return overlap(flight.memory, written) || (flight.writes && reads);
  });
}

NetworkExecutor::Memory NetworkExecutor::written_by(const NetworkStep& step) const {
  if (step.kind == Kind::kSend) return {};
  return {address(step.to), bytes_of(step.elements)};
}

std::array<NetworkExecutor::Memory, 2> NetworkExecutor::read_by(const NetworkStep& step) const {
  if (step.kind == Kind::kReceive || is_scattered(step.from)) return {};  // nothing writes an input in several places
  if (step.kind != Kind::kReduce) return {Memory{address(step.from), bytes_of(step.elements)}, Memory{}};
  const size_t sources = group_.members.size() * schedule_.source_stride;
  return {Memory{address(step.from), bytes_of(sources)}, Memory{address(step.own), bytes_of(step.elements)}};
}

void NetworkExecutor::launch(const NetworkStep& step) {
  const int world = group_.world_rank(step.peer);
  const bool receives = step.kind == Kind::kReceive;
  const size_t bytes = bytes_of(step.elements);
  if (!receives && is_scattered(step.from)) {
    const size_t offset = bytes_of(step.from.offset);
    flights_.push_back({messages_.send(world, key_, request_.iovecs, offset, bytes), step.peer, {}, false});
    return;
  }
  std::byte* memory = address(receives ? step.to : step.from);
  auto transfer = receives ? messages_.receive(world, key_, memory, bytes) : messages_.send(world, key_, memory, bytes);
  flights_.push_back({std::move(transfer), step.peer, {memory, bytes}, receives});
}

void NetworkExecutor::compute(const NetworkStep& step) {
  std::byte* to = address(step.to);
  if (is_scattered(step.from)) {
    if (to != nullptr)  // the root of a broadcast has no array but its parts
      copy_iovecs(to, request_.iovecs, bytes_of(step.from.offset), bytes_of(step.elements), copy_cached);
    return;
  }
  std::byte* from = address(step.from);
  if (step.kind == Kind::kCopy) {
    if (to != from) std::memcpy(to, from, bytes_of(step.elements));
    return;
  }
  const Descriptor& call = request_.descriptor;
  for (size_t rank = 0; rank < sources_.size(); ++rank)
    sources_[rank] = from + bytes_of(rank * schedule_.source_stride);
  sources_[static_cast<size_t>(group_.rank)] = address(step.own);
  reduce(call.dtype, call.reduce_op, to, sources_.data(), group_.size(), step.elements);
}

std::byte* NetworkExecutor::address(const NetworkPlace& place) const {
  const size_t offset = bytes_of(place.offset);
  const size_t block = static_cast<size_t>(place.block);
  switch (place.kind) {
    case NetworkPlace::Kind::kInput: {
      const void* base = request_.inputs.empty() ? request_.input : request_.inputs[block].data;
      return static_cast<std::byte*>(const_cast<void*>(base)) + offset;  // only read: no schedule writes there
    }
    case NetworkPlace::Kind::kOutput: {
      void* base = request_.outputs.empty() ? request_.output : request_.outputs[block].data;
      return static_cast<std::byte*>(base) + offset;
    }
    case NetworkPlace::Kind::kScratch:
      break;
  }
  return scratch_.get() + offset;
}

bool NetworkExecutor::is_scattered(const NetworkPlace& place) const {
  return place.kind == NetworkPlace::Kind::kInput && !request_.iovecs.empty();
}

std::vector<int> NetworkExecutor::missing() const {
  std::vector<int> ranks;
  for (const Flight& flight : flights_) {
    if (std::ranges::find(ranks, flight.peer) == ranks.end()) ranks.push_back(flight.peer);
  }
  return ranks;
}

}  // namespace procgroup
