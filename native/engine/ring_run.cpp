#include "engine/ring_run.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "dtype/dtype.hpp"
#include "dtype/partial.hpp"

namespace procgroup {
namespace {

// Transfers that run at once. Enough to keep every link busy; few enough to compare each step with all.
constexpr size_t kMaxFlights = 32;

using Kind = RingStep::Kind;

bool overlap(const std::byte* first, size_t first_bytes, const std::byte* second, size_t second_bytes) {
  return first < second + second_bytes && second < first + first_bytes;
}

}  // namespace

RingRun::RingRun(Messages& messages, const GroupView& group, const Descriptor& call, MessageKey key, RingPlan plan,
                 const void* input, const std::vector<void*>& outputs)
    : messages_(messages),
      group_(group),
      call_(call),
      key_(key),
      plan_(std::move(plan)),
      input_(input),
      outputs_(outputs),
      partial_(std::make_unique_for_overwrite<std::byte[]>(plan_.partial_elements *
                                                           dtype_size(partial_dtype(call.dtype, call.reduce_op)))),
      result_(std::make_unique_for_overwrite<std::byte[]>(plan_.result_elements * dtype_size(call.dtype))) {}

RingRun::~RingRun() {
  Failure aborted{};
  aborted.kind = Failure::Kind::kAborted;
  for (const Flight& flight : flights_) {
    if (!flight.transfer->is_over()) messages_.cancel(*flight.transfer, aborted);
  }
}

Progress RingRun::advance() {
  const size_t before = next_;
  const size_t flying = flights_.size();
  land();
  const bool landed = flights_.size() < flying;
  while (!failure_ && next_ < plan_.steps.size()) {
    const RingStep& step = plan_.steps[next_];
    if (flights_.size() >= kMaxFlights || must_wait(step)) break;
    issue(step);
    ++next_;
    land();
  }
  if (failure_ || (next_ == plan_.steps.size() && flights_.empty())) return Progress::kDone;
  return landed || next_ > before ? Progress::kMoved : Progress::kWaiting;
}

void RingRun::land() {
  std::erase_if(flights_, [&](const Flight& flight) {
    if (!flight.transfer->is_over()) return false;
    if (flight.transfer->failure() != nullptr && !failure_) failure_ = *flight.transfer->failure();
    return true;
  });
}

// Whether a running transfer writes what the step touches, or reads what it writes.
bool RingRun::must_wait(const RingStep& step) const {
  const bool writes = step.kind != Kind::kSend;
  const bool reads = step.kind != Kind::kReceive;
  return std::any_of(flights_.begin(), flights_.end(), [&](const Flight& flight) {
    const bool on_target =
        writes && overlap(flight.begin, flight.bytes, address(step.to), step.elements * element_bytes(step.to));
    const bool on_source =
        reads && flight.writes &&
        overlap(flight.begin, flight.bytes, address(step.from), step.elements * element_bytes(step.from));
    return on_target || on_source;
  });
}

void RingRun::issue(const RingStep& step) {
  if (step.kind == Kind::kSend || step.kind == Kind::kReceive) return launch(step);
  compute(step);
}

void RingRun::launch(const RingStep& step) {
  const int world = group_.world_rank(step.peer);
  const bool receives = step.kind == Kind::kReceive;
  const RingPlace& place = receives ? step.to : step.from;
  const size_t bytes = step.elements * element_bytes(place);
  std::byte* memory = address(place);
  auto transfer = receives ? messages_.receive(world, key_, memory, bytes) : messages_.send(world, key_, memory, bytes);
  flights_.push_back({std::move(transfer), step.peer, memory, bytes, receives});
}

void RingRun::compute(const RingStep& step) {
  std::byte* to = address(step.to);
  std::byte* from = address(step.from);
  switch (step.kind) {
    case Kind::kBegin:
      return begin_partial(call_.dtype, call_.reduce_op, to, from, step.elements);
    case Kind::kAdd:
      return add_to_partial(call_.dtype, call_.reduce_op, to, from, step.elements);
    case Kind::kFinish:
      return finish_partial(call_.dtype, call_.reduce_op, to, from, group_.size(), step.elements);
    default:
      if (to != from) std::memmove(to, from, step.elements * element_bytes(step.to));
  }
}

size_t RingRun::element_bytes(const RingPlace& place) const {
  const bool partial = place.kind == RingPlace::Kind::kPartial;
  return dtype_size(partial ? partial_dtype(call_.dtype, call_.reduce_op) : call_.dtype);
}

std::byte* RingRun::address(const RingPlace& place) const {
  const size_t offset = place.offset * element_bytes(place);
  switch (place.kind) {
    case RingPlace::Kind::kInput:  // only read: no plan writes there
      return static_cast<std::byte*>(const_cast<void*>(input_)) + offset;
    case RingPlace::Kind::kOutput:
      return static_cast<std::byte*>(outputs_[static_cast<size_t>(place.rank)]) + offset;
    case RingPlace::Kind::kPartial:
      return partial_.get() + offset;
    case RingPlace::Kind::kResult:
      return result_.get() + offset;
  }
  return nullptr;
}

std::vector<int> RingRun::missing() const {
  std::vector<int> ranks;
  for (const Flight& flight : flights_) {
    if (std::find(ranks.begin(), ranks.end(), flight.peer) == ranks.end()) ranks.push_back(flight.peer);
  }
  return ranks;
}

}  // namespace procgroup
