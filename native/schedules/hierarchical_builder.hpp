// What hierarchical schedules are written with (see hierarchical_schedules.cpp).
#pragma once

#include <vector>

#include "schedules/schedule_writer.hpp"
#include "transport/group_memory.hpp"

namespace procgroup {

class HierarchicalBuilder : public ScheduleWriter {
 public:
  HierarchicalBuilder(const ScheduleRequest& request, Schedule& schedule)
      : ScheduleWriter(request, schedule, request.topology.local_rank(),
                       static_cast<int>(request.topology.local_ranks().size())),
        topology_(request.topology) {
    schedule.widening = request.widening;
  }

  const ScheduleRequest& request() const { return request_; }
  int rank() const { return request_.rank; }
  int size() const { return topology_.size(); }
  int hosts() const { return topology_.hosts(); }
  int own_host() const { return topology_.own_host(); }
  int local_size() const { return static_cast<int>(topology_.local_ranks().size()); }
  int local_rank() const { return topology_.local_rank(); }
  bool is_alone() const { return local_size() == 1; }
  int host_at(int distance) const { return (own_host() + distance + hosts()) % hosts(); }
  // The rank of a host that acts there for a rank of another host: all take part in turn.
  int agent_on(int host, int rank_elsewhere) const {
    const std::vector<int>& ranks = topology_.ranks_on(host);
    return ranks[static_cast<size_t>(topology_.index_of(rank_elsewhere)) % ranks.size()];
  }
  // The slot of this round of the rank at that place on this host.
  Place slot(int index, size_t offset = 0) const {
    return in_slot((request_.earlier_chunks + schedule_.chunks) % kSlots, index, offset);
  }
  Place own_slot(size_t offset = 0) const { return slot(local_rank(), offset); }
  // Round k overwrites what was copied in in round k-4: all have published k-1, so they have read round k-2.
  template <class CopyIn, class Read>
  void run_round(CopyIn copy_in, Read read) {
    if (is_alone()) return read();
    copy_in();
    publish(schedule_.chunks + 1);
    await(kEveryone, schedule_.chunks + 1);
    read();
    ++schedule_.chunks;
  }
  size_t widened(size_t bytes) const { return bytes * request_.widening; }
  // Whether this rank's elements are the partial results of its host.
  bool has_partial_input() const { return is_alone() && request_.widening == 1; }
  // Reduce what all ranks of this host have at `offset` of their slots to partial results.
  void reduce_slots(Place to, size_t offset, Place own, size_t bytes) {
    if (has_partial_input()) return;
    reduce(to, slot(0, offset), own, bytes);
    set_stage(Stage::kToPartial, bytes);
  }
  // Reduce the partial results of this host, which are at `own`, and those that came from the others.
  void reduce_hosts(Place to, size_t offset, Place own, size_t bytes) {
    reduce_from(hosts(), own_host(), to, scratch(offset), own, bytes);
    set_stage(Stage::kFromPartial, bytes);
  }
  // What the reductions between hosts need: `bytes` for each host. Before other scratch is taken.
  void reserve_sources(size_t bytes) {
    schedule_.source_stride = bytes;
    schedule_.scratch_bytes = bytes * static_cast<size_t>(hosts());
  }

 private:
  const Topology& topology_;
};

// all_reduce, and with a root reduce.
void schedule_hierarchical_reduction(HierarchicalBuilder& builder);
void schedule_hierarchical_reduce_scatter(HierarchicalBuilder& builder);

}  // namespace procgroup
