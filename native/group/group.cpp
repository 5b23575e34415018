#include "group/group.hpp"

#include <algorithm>
#include <utility>

#include "group/group_creation.hpp"
#include "runtime/call_report.hpp"
#include "runtime/recording.hpp"

namespace procgroup {

Group::Group(Engine& engine, GroupOptions options)
    : engine_(engine), options_(std::move(options)), members_(*this, engine, options_), watch_(*this, members_) {
  engine_.add_name(options_.id, {options_.name, members_.global_ranks()});
  std::vector<int> members;
  for (const int member : options_.members) members.push_back(engine_.recorded_rank(member));
  engine_.record().add_group({options_.id, options_.rank, size(), options_.name, std::move(members)});
  engine_.progress().add(this);
}

Group::~Group() {
  if (engine_.forked()) return;
  leave();
  engine_.remove_name(options_.id);
  members_.close();
}

void Group::attach(const std::vector<uint64_t>& offsets, const std::vector<int>& hosts) {
  options_.hosts = hosts;
  members_.attach(offsets);
}

// Members that had received everybody in time have gone on, and look at this rank's post.
void Group::refuse_to_begin(const Failure& failure) {
  members_.post(Broken{failure.summary()});
  throw OperationFailed{failure, {}};
}

bool Group::is_idle() const { return calls_.is_empty() && messages_.is_idle() && devices_.is_empty(); }

void Group::examine_pending() {
  for (const auto& message : messages_.pending()) watch_.examine_running(*message);
  for (const auto& work : devices_.pending()) watch_.examine_running(*work);
  calls_.examine();
}

int64_t Group::longest_sleep_ns() {
  return std::min({calls_.longest_sleep_ns(), messages_.longest_sleep_ns(), devices_.longest_sleep_ns()});
}

bool Group::note_pending() { return messages_.note_pending() || !devices_.is_empty() || !calls_.is_empty(); }

std::optional<size_t> Group::open_receives(const Operation& waited, const std::vector<int>& awaited) {
  // In this order, because a message that has completed is followed by work on a device.
  const std::optional<size_t> receives = messages_.open_receives(waited, awaited);
  if (calls_.has_other_than(waited) || devices_.has_other_than(waited)) return std::nullopt;
  return receives;
}

void Group::rename_ranks() {
  members_.adopt_ranks();
  engine_.add_name(options_.id, {options_.name, members_.global_ranks()});
}

void Group::handshake(const std::string& call, double seconds, LanguageRuntime& language, uint32_t source) {
  Descriptor making;
  making.group = options_.id;
  making.op = kMakesGroup;
  Recording recording(engine_.recorder(), making, source);
  members_.set_announced();
  if (options_.hosts.empty()) options_.hosts.assign(options_.members.size(), 0);
  const std::string line = short_line(engine_.record().view().source_line(source));
  const std::string stated = line.empty() ? call : call + " at " + line;
  GroupCreation operation(engine_, options_.id, options_.members, members_.offset(), stated);
  WaitReport report;
  DeadlockDetector watch(engine_, seconds, engine_.suspicious_ns());
  const auto look = [&](const Operation&) {
    const WaitReport::Due due = report.look(engine_.wait_report_ns(), seconds, {});
    if (due != WaitReport::Due::kNothing)
      engine_.report_wait(due, {engine_.rank(), stated, operation.missing(), report.waited_ns()}, options_.id);
    std::optional<Failure> failure = operation.examine();
    return failure ? failure : watch_.find_deadlock(watch, operation, [&] { return operation.awaited(); }, language);
  };
  std::optional<Failure> failure;
  {
    const Released released(language);
    WaitBudget budget(engine_.policy(), seconds);
    wait(operation, budget, engine_, language, look);
    recording.end(operation.failure());
    if (operation.failure() != nullptr) failure = watch.announced().value_or(*operation.failure());
    if (failure) watch_.explain(*failure, true);
  }
  refused_ = operation.refused();
  if (failure) refuse_to_begin(*failure);
  members_.set_created();
  failure = members_.misplaced(operation.offsets());
  if (failure) refuse_to_begin(*failure);
  attach(operation.offsets(), options_.hosts);
}

void Group::abort() {
  end_.break_with(Aborted{}, {});
  members_.announce_leaving(calls_.ended());
  engine_.announce_news();
}

// Where earlier calls have not completed, the number of the call is not known: then the failure is one of all calls.
void Group::fail_call(Descriptor call, std::string reason) {
  call.group = options_.id;
  call.sequence = 0;
  if (calls_.is_idle()) call = calls_.numbered(call);
  end_.break_with(Failed{.peer = rank(), .reason = std::move(reason)}, call);
  engine_.announce_news();
}

void Group::leave() {
  if (left_) return;
  left_ = true;
  // From here on the progress thread does not touch this group: pending calls end now, and no thread waits for ever.
  engine_.progress().remove(this);
  // Another rank's work would wait on its GPU for that of this rank, also beyond the end of its group.
  devices_.advance();
  if (calls_.has_device_calls() || devices_.has_unfinished())
    end_.break_with(Broken{"this rank left the group before its calls on a GPU had ended"}, {});
  calls_.break_with_unseen();
  end_.leave();
  members_.announce_leaving(calls_.ended());
  examine_pending();
  devices_.forget_captured();
  // End also the operations that moved while they were examined: no thread looks at them again.
  {
    const std::unique_lock held = calls_.hold();
    for (const auto& pending : {messages_.pending(), devices_.pending(), calls_.pending()})
      for (const std::shared_ptr<GroupOperation>& operation : pending)
        if (!operation->is_completed()) operation->give_up(*end_.broken());
  }
  engine_.completed();
}

Progress Group::advance_pending() { return std::max({calls_.advance(), messages_.advance(), devices_.advance()}); }

}  // namespace procgroup
