// Which members of a group share memory: the hosts of the group.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace procgroup {

// Hosts are numbered by the lowest group rank on each; the first rank of a host is its *leader*, which exchanges the
// announcements of its host with the other leaders.
class Topology {
 public:
  Topology() = default;
  // `hosts` gives each member's host by group rank, as any number that is equal for those that share memory.
  Topology(const std::vector<int>& hosts, int rank) : host_of_(hosts.size()), index_of_(hosts.size()) {
    std::map<int, int> numbers;
    for (size_t member = 0; member < hosts.size(); ++member) {
      const auto [found, is_new] = numbers.try_emplace(hosts[member], static_cast<int>(numbers.size()));
      if (is_new) hosts_.emplace_back();
      std::vector<int>& host = hosts_[static_cast<size_t>(found->second)];
      host_of_[member] = found->second;
      index_of_[member] = static_cast<int>(host.size());
      host.push_back(static_cast<int>(member));
    }
    own_ = host_of_[static_cast<size_t>(rank)];
    local_rank_ = index_of_[static_cast<size_t>(rank)];
  }
  static Topology one_host(int size, int rank) { return {std::vector<int>(static_cast<size_t>(size), 0), rank}; }

  int size() const { return static_cast<int>(host_of_.size()); }
  int hosts() const { return static_cast<int>(hosts_.size()); }
  int own_host() const { return own_; }
  // The group ranks on a host, in order.
  const std::vector<int>& ranks_on(int host) const { return hosts_[static_cast<size_t>(host)]; }
  const std::vector<int>& local_ranks() const { return ranks_on(own_); }
  int leader_of(int host) const { return ranks_on(host).front(); }
  int host_of(int rank) const { return host_of_[static_cast<size_t>(rank)]; }
  // The place of a rank among those of its host.
  int index_of(int rank) const { return index_of_[static_cast<size_t>(rank)]; }
  int local_rank() const { return local_rank_; }
  bool is_local(int rank) const { return host_of(rank) == own_; }
  bool is_leader() const { return local_rank_ == 0; }
  // The members of other hosts that this rank represents on its own: all of them on a leader.
  size_t represented() const { return is_leader() ? host_of_.size() - local_ranks().size() : 0; }
  bool spans_hosts() const { return hosts_.size() > 1; }
  // Whether no two members share memory.
  bool is_flat() const { return hosts_.size() == host_of_.size(); }
  size_t most_ranks_on_a_host() const {
    size_t most = 0;
    for (const std::vector<int>& host : hosts_) most = std::max(most, host.size());
    return most;
  }

 private:
  std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_;
  std::vector<int> index_of_;
  int own_ = 0;
  int local_rank_ = 0;
};

}  // namespace procgroup
