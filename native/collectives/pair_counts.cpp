#include "collectives/pair_counts.hpp"

#include <string>

namespace procgroup {
namespace {

constexpr uint64_t kMostBytes = INT64_MAX;

std::string in_words(const Descriptor& call, uint64_t announced) {
  const std::string dtype = std::string(" ") + dtype_name(call.dtype);
  if (!is_joined(call, announced)) return std::to_string(announced) + dtype;
  return std::to_string(first_joined(announced)) + " and " + std::to_string(second_joined(announced)) + dtype;
}

}  // namespace

uint64_t PairCounts::given_before(int from, int end) const {
  uint64_t sum = 0;
  for (int to = 0; to < end; ++to) sum += between(from, to);
  return sum;
}

Failure PairCounts::mismatch(const Descriptor& call, int from, int to, uint64_t given, uint64_t expected) const {
  const std::string giver = rank_name(from, global_ranks_);
  const std::string taker = rank_name(to, global_ranks_);
  const std::string gives = in_words(call, given);
  const std::string expects = in_words(call, expected);
  Mismatch failure;
  failure.reason = giver + " gives " + gives + " to " + taker + ", which expects " + expects + " from it";
  failure.calls.assign(size_, call.describe(global_ranks_));
  failure.calls[static_cast<size_t>(from)] += ", " + gives + " to " + taker;
  failure.calls[static_cast<size_t>(to)] += ", " + expects + " from " + giver;
  return failure;
}

std::optional<Failure> PairCounts::excess(const Descriptor& call) const {
  const uint64_t most = kMostBytes / dtype_size(call.dtype);
  const auto refuse = [&](int rank, const char* does, uint64_t count, const char* preposition, int peer) {
    return Failed{.peer = rank,
                  .reason = std::string("it announced that it ") + does + " " + std::to_string(count) + " " +
                            dtype_name(call.dtype) + " " + preposition + " " + rank_name(peer, global_ranks_) +
                            ", expected less than 2^63 bytes " + preposition + " all ranks together"};
  };
  for (int rank = 0; rank < static_cast<int>(size_); ++rank) {
    uint64_t gives = 0;
    uint64_t expects = 0;
    for (int peer = 0; peer < static_cast<int>(size_); ++peer) {
      if (between(rank, peer) > most - gives) return refuse(rank, "gives", between(rank, peer), "to", peer);
      if (between(peer, rank) > most - expects) return refuse(rank, "expects", between(peer, rank), "from", peer);
      gives += between(rank, peer);
      expects += between(peer, rank);
    }
  }
  return std::nullopt;
}

}  // namespace procgroup
