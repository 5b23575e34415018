// Makes a group on this rank, as an operation that completes when every member has sent that it makes the group, too.
#pragma once

#include <string>
#include <vector>

#include "group/engine.hpp"
#include "runtime/operation.hpp"

namespace procgroup {

// The ranks in failure() and missing() are world ranks.
class GroupCreation final : public Operation {
 public:
  GroupCreation(Engine& engine, uint64_t identity, std::vector<int> members, uint64_t memory, std::string call);

  ~GroupCreation() override;

  Progress advance() override;
  std::vector<int> missing() const override;
  void give_up(Failure failure) override;

  // Ends the operation for another reason than the members' messages: a lost member, an abort.
  std::optional<Failure> examine() const;
  // The members that do not make the group yet. Nothing while one of them makes another group with this rank: that is
  // an error of its own.
  std::optional<Awaited> awaited() const;
  // On success: the offset of each member's group memory.
  const std::vector<uint64_t>& offsets() const { return offsets_; }
  // After a mismatch: the other groups in which members waited for this rank. No rank makes them.
  const std::vector<uint64_t>& refused() const { return refused_; }

 private:
  // These with the mutex of Messages held.
  void expect_members(bool begins);
  bool look();  // whether the result is known
  std::vector<int> unreceived() const;
  bool find_conflict(const std::vector<int>& silent);
  void end_with(Failure failure);

  Engine& engine_;
  const uint64_t identity_;
  const std::vector<int> members_;
  const uint64_t memory_;
  const std::string call_;
  int64_t began_ns_ = 0;
  int64_t conflict_since_ns_ = 0;
  std::vector<uint64_t> offsets_;
  std::vector<uint64_t> refused_;
};

}  // namespace procgroup
