#include "store/in_process_store.hpp"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "base/file_descriptor.hpp"
#include "store/table.hpp"

namespace procgroup::store {

struct InProcessStore::State {
  explicit State(int64_t slice) : slice_ns(slice) {}

  struct PendingRequest {
    std::condition_variable answered;
    std::optional<StoreAnswer> answer;
  };

  bool is_forked() const { return generation != fork_generation(); }
  void deliver(Ticket ticket, StoreAnswer&& answer) {
    PendingRequest& waiter = *waiters.at(ticket.connection);
    waiter.answer = std::move(answer);
    waiter.answered.notify_one();
  }

  const uint64_t generation = fork_generation();
  const int64_t slice_ns;
  std::mutex mutex;
  // Under the mutex. The number of a call is its ticket's connection.
  uint64_t next_call = 0;
  std::unordered_map<uint64_t, PendingRequest*> waiters;
  Table table{[this](Ticket ticket, StoreAnswer&& answer) { deliver(ticket, std::move(answer)); }};
};

// One request, from its entry into the table until its answer is taken or its thread gives it up. Holds the lock
// except inside `check`.
class InProcessStore::Call {
 public:
  explicit Call(State& state) : state_(state), lock_(state.mutex), ticket_{state.next_call++, 0} {
    state_.waiters.emplace(ticket_.connection, &waiter_);
  }
  ~Call() {
    // `check` may have forked, in a signal's handler: the child must touch neither the lock nor the table.
    if (state_.is_forked()) {
      static_cast<void>(lock_.release());
      return;
    }
    if (!lock_.owns_lock()) lock_.lock();
    state_.table.cancel(ticket_);
    state_.waiters.erase(ticket_.connection);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  StoreAnswer run(Op op, std::string_view body, Deadline deadline, const Check& check) {
    state_.table.run(ticket_, op, body);
    while (!waiter_.answer) {
      if (deadline.passed()) {
        state_.table.cancel(ticket_);
        break;
      }
      waiter_.answered.wait_for(lock_, std::chrono::nanoseconds(deadline.remaining_ns(state_.slice_ns)));
      if (!waiter_.answer) call_unlocked(check);
    }
    return std::move(*waiter_.answer);
  }

 private:
  void call_unlocked(const Check& check) {
    lock_.unlock();
    check();
    if (state_.is_forked()) throw ForkedStore{};
    lock_.lock();
  }

  State& state_;
  State::PendingRequest waiter_;
  std::unique_lock<std::mutex> lock_;
  const Ticket ticket_;
};

InProcessStore::InProcessStore(int64_t slice_ns) : state_(std::make_shared<State>(slice_ns)) {}

InProcessStore::InProcessStore(std::shared_ptr<State> state) : state_(std::move(state)) {}

InProcessStore::~InProcessStore() {
  // In a forked child the state is never destroyed: another thread's request may have been changing it.
  if (state_->is_forked()) new std::shared_ptr<State>(std::move(state_));
}

void InProcessStore::check_usable() const {
  if (state_->is_forked()) throw ForkedStore{};
  if (closed_.load(std::memory_order_acquire)) throw ClosedStore{};
}

Reply InProcessStore::request(Op op, std::string_view head, std::string_view tail, Deadline deadline,
                              const Check& check) {
  check_usable();
  std::string body;
  body.reserve(head.size() + tail.size());
  body.append(head).append(tail);
  // The call ends, and with it the lock, before a value is copied.
  const StoreAnswer answer = Call(*state_).run(op, body, deadline, check);
  return answer.to_reply();
}

std::unique_ptr<InProcessStore> InProcessStore::clone() const {
  check_usable();
  return std::unique_ptr<InProcessStore>(new InProcessStore(state_));
}

}  // namespace procgroup::store
