// The counts of an operation by pair: every rank announces what it sends to each, and what it expects from each.
//
// A broken rank may announce any counts, and change them while others read. So each count is read once, into this
// table, and a call uses only a table without a fault: a rank sends what its receiver expects, and the counts of one
// rank add up to less than 2^63 bytes. So no sum of them overflows, and no memory holds more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/request.hpp"
#include "runtime/failure.hpp"

namespace procgroup {

class PairCounts {
 public:
  // Read `given(from, to)` and `expected(from, to)`, as Block::announced has them, for all pairs. Returns the first
  // fault, which is the same on all ranks; its ranks are group ranks.
  template <class Given, class Expected>
  std::optional<Failure> read(const Descriptor& call, int size, Given given, Expected expected,
                              const std::vector<int>* global_ranks = nullptr) {
    global_ranks_ = global_ranks;
    size_ = static_cast<size_t>(size);
    counts_.clear();
    for (int from = 0; from < size; ++from) {
      for (int to = 0; to < size; ++to) {
        const uint64_t count = given(from, to);
        const uint64_t awaited = expected(from, to);
        if (count != awaited) return mismatch(call, from, to, count, awaited);
        counts_.push_back(announced_count(call, count));
      }
    }
    return excess(call);
  }

  uint64_t between(int from, int to) const {
    return counts_[static_cast<size_t>(from) * size_ + static_cast<size_t>(to)];
  }
  // The sum of a rank's counts for the ranks before `end`.
  uint64_t given_before(int from, int end) const;
  uint64_t given(int from) const { return given_before(from, static_cast<int>(size_)); }

 private:
  Failure mismatch(const Descriptor& call, int from, int to, uint64_t given, uint64_t expected) const;
  std::optional<Failure> excess(const Descriptor& call) const;

  const std::vector<int>* global_ranks_ = nullptr;  // for texts, see rank_name
  size_t size_ = 0;
  std::vector<uint64_t> counts_;
};

}  // namespace procgroup
