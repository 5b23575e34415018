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
#include <algorithm>
#include <vector>

#include "schedules/hierarchical_builder.hpp"

namespace procgroup {
namespace {

// The ranks of other hosts for which a rank of a host acts there, in order.
std::vector<int> clients_of(const HierarchicalBuilder& builder, int agent) {
  const Topology& topology = builder.request().topology;
  std::vector<int> clients;
  for (int rank = 0; rank < builder.size(); ++rank)
    if (topology.host_of(rank) != topology.host_of(agent) && builder.agent_on(topology.host_of(agent), rank) == agent)
      clients.push_back(rank);
  return clients;
}

void schedule_all_gather(HierarchicalBuilder& builder) {
  const ScheduleRequest& request = builder.request();
  const Topology& topology = request.topology;
  size_t lanes = 1;  // of a slot: the own block's, and one for each client's
  for (int rank = 0; rank < builder.size(); ++rank) lanes = std::max(lanes, 1 + clients_of(builder, rank).size());
  const size_t part = builder.whole_elements(request.chunk_bytes / lanes);
  const size_t rounds = parts_of(request.blocks.largest(), part);
  const auto range = [&](int from, size_t round) { return part_of(request.blocks.between(from, from), round, part); };
  std::vector<std::vector<int>> clients;
  for (const int rank : topology.local_ranks()) clients.push_back(clients_of(builder, rank));
  const std::vector<int>& own_clients = clients[static_cast<size_t>(builder.local_rank())];
  builder.copy(output(0, builder.rank()), input(0), request.blocks.between(builder.rank(), builder.rank()));
  for (size_t round = 0; round <= rounds; ++round) {
    for (int from = 0; from < builder.size() && round < rounds; ++from) {
      const Range moves = range(from, round);
      if (from == builder.rank()) {
        for (int distance = 1; distance < builder.hosts(); ++distance)
          builder.send(builder.agent_on(builder.host_at(distance), from), input(moves.offset), moves.bytes);
      } else if (std::ranges::find(own_clients, from) != own_clients.end()) {
        builder.receive(from, output(moves.offset, from), moves.bytes);
      }
    }
    // The own block's part of this round, and the others' of the round before, which have come meanwhile.
    const auto each_part = [&](int index, const auto& visit) {
      const int owner = topology.local_ranks()[static_cast<size_t>(index)];
      if (round < rounds) visit(owner, range(owner, round), size_t{0});
      const std::vector<int>& theirs = clients[static_cast<size_t>(index)];
      for (size_t lane = 0; round > 0 && lane < theirs.size(); ++lane)
        visit(theirs[lane], range(theirs[lane], round - 1), (lane + 1) * part);
    };
    builder.run_round(
        [&] {
          each_part(builder.local_rank(), [&](int from, Range moves, size_t offset) {
            const Place source = from == builder.rank() ? input(moves.offset) : output(moves.offset, from);
            builder.copy(builder.own_slot(offset), source, moves.bytes);
          });
        },
        [&] {
          builder.for_each_peer([&](int peer) {
            each_part(peer, [&](int from, Range moves, size_t offset) {
              builder.copy(output(moves.offset, from), builder.slot(peer, offset), moves.bytes);
            });
          });
        });
  }
}

void schedule_broadcast(HierarchicalBuilder& builder) {
  const ScheduleRequest& request = builder.request();
  const Topology& topology = request.topology;
  const size_t chunk = builder.whole_elements(request.chunk_bytes);
  const size_t chunks = parts_of(request.bytes, chunk);
  // The rank of a host to which the array comes, and from which it goes to the next host and to its own host's ranks.
  const auto gateway = [&](int host) {
    return host == topology.host_of(request.root) ? request.root : topology.leader_of(host);
  };
  const bool is_root = builder.rank() == request.root;
  const bool is_gateway = builder.rank() == gateway(builder.own_host());
  const int next = builder.host_at(1);
  const auto receive = [&](size_t index) {
    const Range moves = part_of(request.bytes, index, chunk);
    if (is_gateway && !is_root) builder.receive(gateway(builder.host_at(-1)), output(moves.offset), moves.bytes);
  };
  receive(0);
  for (size_t index = 0; index < chunks; ++index) {
    receive(index + 1);
    const Range moves = part_of(request.bytes, index, chunk);
    const Place source = is_root ? input(moves.offset) : output(moves.offset);
    if (is_gateway && next != topology.host_of(request.root)) builder.send(gateway(next), source, moves.bytes);
    builder.run_round(
        [&] {
          if (is_gateway) builder.copy(builder.own_slot(), source, moves.bytes);
        },
        [&] {
          const int from = topology.index_of(gateway(builder.own_host()));
          if (!is_gateway) builder.copy(source, builder.slot(from), moves.bytes);
        });
  }
  if (is_root) builder.copy(output(0), input(0), request.bytes);
}

// gather, scatter, all_to_all: what each pair of ranks moves, by what connects them.
void schedule_pairs(HierarchicalBuilder& builder) {
  const ScheduleRequest& request = builder.request();
  const Topology& topology = request.topology;
  const std::vector<int>& local = topology.local_ranks();
  const auto given = [&](int to, size_t offset) { return input(offset, has_input_blocks(request.op) ? to : 0); };
  const auto taken = [&](int from, size_t offset) { return output(offset, has_output_blocks(request.op) ? from : 0); };
  const int own = builder.rank();
  builder.copy(taken(own, 0), given(own, 0), request.between(own, own));
  const size_t segment = builder.whole_elements(request.segment_bytes);
  const size_t lanes = std::max<size_t>(local.size() - 1, 1);
  const size_t part = builder.whole_elements(request.chunk_bytes / lanes);
  size_t largest_local = 0;  // of all pairs of this host, so that all its ranks make as many rounds
  size_t largest_remote = 0;
  for (const int from : local)
    for (const int to : local)
      if (from != to) largest_local = std::max(largest_local, request.between(from, to));
  for (int peer = 0; peer < builder.size(); ++peer)
    if (!topology.is_local(peer))
      largest_remote = std::max({largest_remote, request.between(own, peer), request.between(peer, own)});
  const size_t rounds = parts_of(largest_local, part);
  const size_t messages = parts_of(largest_remote, segment);
  const auto lane = [&](int reader, int owner) {
    return static_cast<size_t>((reader - owner - 1 + builder.local_size()) % builder.local_size()) * part;
  };
  for (size_t turn = 0; turn < std::max(rounds, messages); ++turn) {
    for (int distance = 1; distance < builder.size() && turn < messages; ++distance) {
      const int source = (own - distance + builder.size()) % builder.size();
      const int target = (own + distance) % builder.size();
      const Range taken_part = part_of(request.between(source, own), turn, segment);
      const Range given_part = part_of(request.between(own, target), turn, segment);
      if (!topology.is_local(source)) builder.receive(source, taken(source, taken_part.offset), taken_part.bytes);
      if (!topology.is_local(target)) builder.send(target, given(target, given_part.offset), given_part.bytes);
    }
    if (turn >= rounds) continue;
    const auto each_peer = [&](const auto& visit) {
      builder.for_each_peer([&](int index) { visit(index, local[static_cast<size_t>(index)]); });
    };
    builder.run_round(
        [&] {
          each_peer([&](int index, int to) {
            const Range moves = part_of(request.between(own, to), turn, part);
            builder.copy(builder.own_slot(lane(index, builder.local_rank())), given(to, moves.offset), moves.bytes);
          });
        },
        [&] {
          each_peer([&](int index, int from) {
            const Range moves = part_of(request.between(from, own), turn, part);
            builder.copy(taken(from, moves.offset), builder.slot(index, lane(builder.local_rank(), index)),
                         moves.bytes);
          });
        });
  }
}

}  // namespace

bool has_hierarchical_schedule(OpKind op) {
  const bool moves = row_of(op).givers != Ranks::kNone;
  return moves && !is_message(op) && row_of(op).sources == Sources::kAll;
}

void schedule_hierarchical(const ScheduleRequest& request, Schedule& schedule) {
  HierarchicalBuilder builder(request, schedule);
  switch (request.op) {
    case OpKind::kReduce:
    case OpKind::kAllReduce:
      return schedule_hierarchical_reduction(builder);
    case OpKind::kReduceScatter:
      return schedule_hierarchical_reduce_scatter(builder);
    case OpKind::kAllGather:
      return schedule_all_gather(builder);
    case OpKind::kBroadcast:
      return schedule_broadcast(builder);
    default:
      return schedule_pairs(builder);
  }
}

}  // namespace procgroup
