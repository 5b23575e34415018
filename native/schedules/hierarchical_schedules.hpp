// Schedules for large collectives of groups that span hosts: shared memory inside a host, messages between hosts.
//
// Vocabulary, beside that of schedule.hpp. In a *round* each rank of a host copies something into its slot, publishes,
// awaits all ranks of its host, and reads what it needs from their slots. A *segment* is the block of a chunk that one
// rank of a host reduces for its host. Hosts with unequal numbers of ranks have unequal segments; a *region* is a range
// inside of one segment on every host, and the rank of that segment is the region's *owner* on the host.
//
//   all_reduce       per chunk: a round, in which each rank reduces its segment of its host's arrays; the owners of
//                    each region reduce-scatter and all-gather it between the hosts; a round, which gives all
//                    segments to all
//   reduce           the same, but results go to the owners on the root's host, and in the last round to the root
//   reduce_scatter   a round, in which each block is reduced for the host by the rank that it is for, or by one rank
//                    for each rank of other hosts; these send it there, where all hosts' results are reduced
//   all_gather       each rank sends its block to one rank of each other host, which copies it in for its host
//   broadcast        a chain of hosts, beginning with the root's; on each, one rank copies in the received chunks
//   gather, scatter, all_to_all    rounds between ranks of one host, messages between others
//
// So each byte that another host needs is sent there once, and all ranks of a host send and receive at the same time,
// except in a broadcast. Order of reduction: first the ranks of each host, in group order, then the hosts, by the
// lowest rank on each. It is the same on all ranks, so all have the same bits, but other layouts of ranks give others.
#pragma once

#include "schedules/schedule.hpp"

namespace procgroup {

bool has_hierarchical_schedule(OpKind op);
void schedule_hierarchical(const ScheduleRequest& request, Schedule& schedule);

}  // namespace procgroup
