// What the ranks are doing, for reports of waits and for errors: read in the flight records of this host's ranks, and
// asked of the ranks of other hosts by messages.
#include <algorithm>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "group/engine.hpp"
#include "runtime/call_report.hpp"

namespace procgroup {
namespace {

// How long a rank whose call has reached its deadline waits for the answers of the missing ranks.
constexpr double kAnswerSeconds = 0.3;
constexpr int64_t kAnswerSliceNs = 5'000'000;

// The number of awaited ranks whose state the report of a wait describes.
constexpr size_t kDescribedRanks = 4;

// How long a stack tells what a rank is doing, and how long this rank waits for its own one before it answers a
// question of another host without.
constexpr int64_t kFreshNs = 1'000'000'000;
constexpr int64_t kStackNs = 150'000'000;

}  // namespace

const FlightRecord* Engine::record_of(int peer) const {
  return peer == rank() ? record_.get() : peers_[index(peer)]->record.get();
}

// Whether what this rank is doing is known: its call, or its stack, which is requested now and comes soon.
bool Engine::can_answer() {
  const int64_t now = now_ns();
  const auto stack = record_->view().stack();
  if (procgroup::is_in_call(recorder().read()) || (stack && now - stack->ns < kFreshNs)) return true;
  if (now - stack_requested_ns_ > kFreshNs) {
    stack_requested_ns_ = now;
    record_->request_stack();
  }
  return now - stack_requested_ns_ > kStackNs;
}

// A rank that is in no call answers the questions of other hosts, too.
void Engine::answer_while_idle() {
  if (!uses_sockets_.load(std::memory_order_acquire)) return;
  const std::unique_lock lock(messages_mutex_, std::try_to_lock);
  if (lock && pump()) kick();
}

std::vector<std::string> Engine::calls_of(const std::vector<int>& peers, uint64_t group) {
  await_calls(peers, group);
  return known_calls(peers, group);
}

void Engine::await_calls(const std::vector<int>& peers, uint64_t group, uint64_t captured) {
  const int64_t asked_ns = now_ns();
  query_calls(peers, group, captured);
  await_answers([&] { return std::ranges::all_of(peers, [&](int peer) { return has_answered(peer, asked_ns); }); });
}

// The GPU of a rank that is stopped may have begun meanwhile, and that of one that has gone may still run.
std::vector<std::optional<bool>> Engine::replays_of(const std::vector<int>& peers, const Descriptor& call) {
  await_calls(peers, call.group, call.sequence);
  std::vector<std::optional<bool>> replays;
  const std::lock_guard lock(messages_mutex_);
  for (const int peer : peers) {
    const FlightRecord* record = record_of(peer);
    std::optional<bool>& runs = replays.emplace_back();
    runs = record != nullptr ? runs_replay(record->view(), call.group, call.sequence) : waits_.runs_replay(peer);
    if (runs == false && (is_stopped(peer) || has_gone(peer))) runs.reset();
  }
  return replays;
}

std::optional<bool> Engine::runs_replay(const FlightRecordView& record, uint64_t group, uint64_t captured) {
  const RunningReplays running = record.replays(group);
  if (std::ranges::find(running.calls, captured) != running.calls.end()) return true;
  return running.are_all ? std::optional(false) : std::nullopt;
}

std::vector<std::string> Engine::known_calls(const std::vector<int>& peers, uint64_t group) {
  std::vector<std::string> calls;
  const std::lock_guard lock(messages_mutex_);
  for (const int peer : peers) {
    const FlightRecord* record = record_of(peer);
    calls.push_back(record != nullptr ? activity(record->view(), group) : waits_.calls(peer));
    if (!calls.back().empty()) continue;
    calls.back() = has_gone(peer) ? "gone: it left, or ended, before it could answer"
                                  : "not answering: it is stopped, or its host cannot be reached";
  }
  return calls;
}

std::string Engine::activity(const FlightRecordView& record, uint64_t group) const {
  const std::vector<Record> calls = record.calls();
  std::string text = describe_calls(
      calls, group,
      [&](uint64_t identity) {
        NamedGroup named = group_of(identity);
        for (const RecordedGroup& one : record.groups())
          if (one.identity == identity) named.members = name_members(one);
        return named;
      },
      [&](uint32_t number) { return record.call_site(number); },
      [&](const Descriptor& call) { return record.awaited(call); });
  for (const RecordedGroup& one : record.groups())
    for (const uint64_t number : record.replays(one.identity).calls) {
      const std::string line = short_line(find_line(record, {.group = one.identity, .sequence = number}));
      text += "; its GPU is in a replay of call #" + std::to_string(number);
      text += (one.identity == group ? "" : " on group " + one.name) + (line.empty() ? "" : " at " + line);
    }
  if (const std::string stopped = describe_stopped(record); !stopped.empty()) return stopped + ", and was " + text;
  const auto stack = record.stack();
  if (procgroup::is_in_call(calls) || !stack || now_ns() - stack->ns > kFreshNs) return text;
  const std::string place = describe_stack(stack->text);
  return place.empty() ? text : place + "; it is " + text;
}

bool Engine::is_in_call(int peer) const {
  const FlightRecord* record = peers_[index(peer)]->record.get();
  return record != nullptr && procgroup::is_in_call(record->view().calls());
}

bool Engine::is_stopped(int peer) const {
  const FlightRecord* record = peers_[index(peer)]->record.get();
  return record != nullptr && !describe_stopped(record->view()).empty();
}

// Whether a rank's life or its connection has ended. Under the mutex of messages.
bool Engine::has_gone(int peer) const {
  return peer_status(peer) != PeerStatus::kPresent || messages_.peer_failure(peer) != nullptr;
}

// A rank that is in a call is known by that. One that is stopped takes no stack.
bool Engine::has_answered(int peer, int64_t asked_ns) const {
  const FlightRecord* record = peers_[index(peer)]->record.get();
  if (record == nullptr) return peer == rank() || waits_.has_answered(peer) || has_gone(peer);
  const FlightRecordView view = record->view();
  const auto stack = view.stack();
  return (stack && stack->ns >= asked_ns) || procgroup::is_in_call(view.calls()) || !describe_stopped(view).empty();
}

void Engine::await_answers(const std::function<bool()>& is_known) {
  const Deadline deadline = Deadline::after(kAnswerSeconds);
  while (!deadline.passed()) {
    {
      const std::lock_guard lock(messages_mutex_);
      pump();
      if (is_known()) return;
    }
    sleep(deadline.remaining_ns(kAnswerSliceNs), [] { return false; });
  }
}

std::string Engine::source_line(int peer, const Descriptor& call) const {
  const FlightRecord* record = record_of(peer);
  return record != nullptr ? find_line(record->view(), call) : waits_.source_line(peer, call.group, call.sequence);
}

Engine::CallPlace Engine::place_of(const Descriptor& call) const {
  const FlightRecordView record = record_->view();
  const uint32_t source = find_source(record, call);
  return {record.source_line(source), record.function(source)};
}

void Engine::post_source_line(int peer, const Descriptor& call) {
  const std::lock_guard lock(messages_mutex_);
  waits_.post_source_line(peer, call.group, call.sequence, source_line(rank(), call));
}

void Engine::query_calls(const std::vector<int>& peers, uint64_t group, uint64_t captured) {
  const std::lock_guard lock(messages_mutex_);
  for (const int peer : peers) {
    FlightRecord* record = peers_[index(peer)]->record.get();
    if (record == nullptr)
      waits_.query_calls(peer, group, captured);
    else
      record->request_stack();
  }
}

std::string Engine::line_of_wait(OpKind op) { return short_line(find_line_of_wait(record_->view(), op)); }

void Engine::record_awaited(const Descriptor& call, std::vector<int> peers) {
  for (int& peer : peers) peer = global_rank(peer);
  record_->set_awaited(call, peers);
}

uint64_t Engine::moves_of(const std::vector<int>& peers, uint64_t group) const {
  uint64_t moves = 0;
  for (const int peer : peers)
    if (const FlightRecord* record = record_of(peer)) moves += record->view().moves(group);
  return moves;
}

void Engine::report_wait(WaitReport::Due due, const WaitingCall& call, uint64_t group) {
  const auto first = [&](size_t most) {
    return std::vector<int>(call.awaited.begin(),
                            call.awaited.begin() + static_cast<ptrdiff_t>(std::min(most, call.awaited.size())));
  };
  if (due == WaitReport::Due::kQuestion) query_calls(first(kExplainedRanks), group);
  if (due != WaitReport::Due::kLine) return;
  const std::vector<int> described = first(kDescribedRanks);
  WaitingCall global = call;
  global.rank = global_rank(call.rank);
  for (int& awaited : global.awaited) awaited = global_rank(awaited);
  log_line(LogLevel::kWarning, describe_wait(global, known_calls(described, group)), global.rank);
}

}  // namespace procgroup
