// Says on standard error for whom a call waits, once it has waited for some seconds, so that nobody waits in silence
// for a rank that is late. Costs nothing before a wait is examined for the first time.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"

namespace procgroup {

// When the lines of one wait are due: the first after `first_ns` (never where that is 0), the others a minute apart.
// The wait restarts whenever elements move, however slowly, because no rank is late then.
class WaitReport {
 public:
  static constexpr int64_t kFirstNs = 5'000'000'000;  // unless the user says otherwise
  static constexpr int64_t kRepeatNs = 60'000'000'000;
  // So long before a line, and before the wait's own end, the awaited ranks are queried for their calls, where those
  // cannot be read in shared memory: a rank whose call reaches its deadline first ends, and sends no answer.
  static constexpr int64_t kQuestionNs = 500'000'000;

  enum class Due : uint8_t { kNothing, kQuestion, kLine };

  // Of elements of the group's calls: a number that changes when the awaited ranks move any, and whether this rank has.
  struct Moves {
    std::vector<int> awaited;
    uint64_t theirs = 0;
    bool has_own = false;
  };

  // What is due at this look; the wait began at the first one, and lasts `seconds` at most. The number is compared
  // while the same ranks are awaited: that of a rank that arrives is no longer in it.
  Due look(int64_t first_ns, double seconds, Moves moves) {
    return look(first_ns, seconds, now_ns(), std::move(moves));
  }
  Due look(int64_t first_ns, double seconds, int64_t now, Moves moves);
  // Whether this rank has moved elements since the last time; `moves` is another number then.
  bool note_own_moves(uint64_t moves) { return std::exchange(own_moves_, moves) != moves; }
  int64_t waited_ns() const { return looked_ns_ - since_ns_; }

 private:
  static constexpr int64_t kNever = INT64_MAX;

  void expect_line(int64_t at_ns) {
    line_ns_ = at_ns;
    question_ns_ = at_ns - kQuestionNs;
  }

  int64_t since_ns_ = 0;
  int64_t looked_ns_ = 0;
  Moves moves_;
  uint64_t own_moves_ = 0;
  int64_t line_ns_ = kNever;           // when the next line is due,
  int64_t question_ns_ = kNever;       // the question before it,
  int64_t last_question_ns_ = kNever;  // and the one before the wait's end
};

// A call that waits, as the line names it.
struct WaitingCall {
  int rank;                  // this rank
  std::string name;          // "all_reduce #3 on group 0, at train.py:12"
  std::vector<int> awaited;  // world ranks; none where any other rank may end the wait
  int64_t waited_ns;
};

// The line about a call; `calls` are what the first of the awaited ranks are doing, in words that follow "rank 1 is".
std::string describe_wait(const WaitingCall& call, const std::vector<std::string>& calls);

}  // namespace procgroup
