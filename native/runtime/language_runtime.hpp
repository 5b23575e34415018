// The functions that the engine needs from the language that calls it.
#pragma once

namespace procgroup {

// For Python: the global interpreter lock, and signals that Python code wants to handle.
class LanguageRuntime {
 public:
  virtual ~LanguageRuntime() = default;
  // Let other threads of the language run; take the lock back.
  virtual void unlock() = 0;
  virtual void lock() = 0;
  // Called unlocked: whether the caller must stop waiting (a signal handler raised). Leaves it unlocked.
  virtual bool interrupted() = 0;
  // Called unlocked: whether no other thread of the language, and no alarm, could make a call or end this one.
  virtual bool alone() { return false; }
};

// Lets other threads of the language run until the end of the scope.
class Released {
 public:
  explicit Released(LanguageRuntime& language) : language_(language) { language_.unlock(); }
  ~Released() { language_.lock(); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  LanguageRuntime& language_;
};

// For callers that are not Python: no lock to release, no interrupts.
class NoRuntime final : public LanguageRuntime {
 public:
  void unlock() override {}
  void lock() override {}
  bool interrupted() override { return false; }
};

}  // namespace procgroup
