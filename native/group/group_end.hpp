// The end of a group on this rank: the failure that broke it, once, and which call of the program reports that.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>

#include "ops/descriptor.hpp"
#include "runtime/failure.hpp"

namespace procgroup {

class Group;

// A failed call: thrown by the blocking forms, and made from a completed Operation.
struct OperationFailed {
  Failure failure;
  Descriptor call;
};

// Any thread may call any of these.
class GroupEnd {
 public:
  explicit GroupEnd(Group& group) : group_(group) {}
  GroupEnd(const GroupEnd&) = delete;

  // Whether a failure has ended the group, or this rank has left it; and the failure of later calls then.
  bool is_completed() const { return completed_.load(std::memory_order_acquire); }
  std::optional<Failure> broken() const;
  // End the group by a failure in `call`: post it, and wake the members. Only the first one counts.
  void break_with(Failure failure, const Descriptor& call);
  // This rank leaves the group in order.
  void leave();
  // Called once, when a failure ends the group, from any thread. Set before the first call.
  void on_broken(std::function<void()> end_device_work) { end_device_work_ = std::move(end_device_work); }
  // The member by whose end the group broke, with the summary as its reason; nothing where it did not.
  std::optional<Lost> lost() const;

  // What a call raises that ends with `failure`. Where that is the loss or the end of what earlier calls need, too, and
  // nobody waits for those, the first of them is the call that fails: once. Any other failure is raised as it is.
  OperationFailed reported(Failure failure, const Descriptor& call);
  // The program has the error of this call: no other call raises it.
  void set_reported(const Descriptor& call);
  // A call that fails ends the group. No caller waits for it, or the program may make another call before it does.
  void keep_unreported(Failure failure, Descriptor call, bool is_unawaited);
  // The failure of a call that nobody waited for and that no call has raised: the program does not know it.
  std::optional<OperationFailed> take_unraised();

 private:
  bool is_kept(const Descriptor& call) const;  // with mutex_

  Group& group_;
  std::atomic<bool> completed_{false};  // broken or left; reason_ says why
  std::function<void()> end_device_work_;
  mutable std::mutex mutex_;  // guards what follows
  std::optional<Failure> reason_;
  std::optional<Lost> lost_;
  std::optional<OperationFailed> unreported_;  // a call that has ended the group
  bool is_unawaited_ = false;                  // nobody waits for that call
  bool is_reported_ = false;                   // a call has raised what ended the group
};

}  // namespace procgroup
