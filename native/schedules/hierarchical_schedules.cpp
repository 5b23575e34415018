#include "schedules/hierarchical_schedules.hpp"

#include <algorithm>
#include <vector>

#include "transport/group_memory.hpp"

namespace procgroup {
namespace {

// Buffers of a chunk that is reduced, sent and copied out in three turns of the pipeline.
constexpr size_t kTurns = 3;

Place input(size_t offset, int block = 0) { return {.kind = Place::Kind::kInput, .rank = block, .offset = offset}; }
Place output(size_t offset, int block = 0) { return {.kind = Place::Kind::kOutput, .rank = block, .offset = offset}; }
Place scratch(size_t offset) { return {.kind = Place::Kind::kScratch, .offset = offset}; }
Place moved(Place place, size_t offset) {
  place.offset += offset;
  return place;
}

class Builder : public ScheduleWriter {
 public:
  Builder(const HierarchicalScheduleRequest& request, Schedule& schedule)
      : ScheduleWriter(schedule, request.topology.local_rank(),
                       static_cast<int>(request.topology.local_ranks().size())),
        request_(request),
        topology_(request.topology) {
    schedule.widening = request.widening;
  }

  const HierarchicalScheduleRequest& request() const { return request_; }
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
  size_t whole_elements(size_t bytes) const {
    return std::max(bytes / request_.element_bytes, size_t{1}) * request_.element_bytes;
  }

  // The slot of this round of the rank at that place on this host.
  Place slot(int index, size_t offset = 0) const {
    return {.kind = Place::Kind::kSlot,
            .slot = static_cast<int8_t>((request_.earlier_chunks + schedule_.chunks) % kSlots),
            .rank = index,
            .offset = offset};
  }
  Place own_slot(size_t offset = 0) const { return slot(local_rank(), offset); }
  // Round k overwrites what was copied in in round k-4: all have published k-1, so they have read round k-2.
  template <class CopyIn, class Read>
  void round(CopyIn copy_in, Read read) {
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
  Place from_host(int host, size_t offset) const {
    return {.kind = Place::Kind::kScratch, .rank = host, .offset = offset};
  }
  // What the reductions between hosts need: `bytes` for each host. Before other scratch is taken.
  void reserve_sources(size_t bytes) {
    schedule_.source_stride = bytes;
    schedule_.scratch_bytes = bytes * static_cast<size_t>(hosts());
  }
  size_t more_scratch(size_t bytes) {
    schedule_.scratch_bytes += bytes;
    return schedule_.scratch_bytes - bytes;
  }

 private:
  const HierarchicalScheduleRequest& request_;
  const Topology& topology_;
};

// all_reduce, and with a root reduce.
class ReductionSchedule {
 public:
  explicit ReductionSchedule(Builder& builder)
      : builder_(builder),
        topology_(builder.request().topology),
        chunk_(builder.whole_elements(builder.request().chunk_bytes)),
        chunks_((builder.request().bytes + chunk_ - 1) / chunk_),
        root_(builder.request().root) {}

  void write() {
    if (chunks_ == 0) return;
    whole_ = regions_of(0);
    last_ = regions_of(chunks_ - 1);
    source_bytes_ = std::max(own_shares(0), own_shares(chunks_ - 1));
    builder_.reserve_sources(2 * builder_.widened(source_bytes_));
    buffer_bytes_ = std::max(segment(0, builder_.own_host(), builder_.local_rank()).bytes,
                             segment(chunks_ - 1, builder_.own_host(), builder_.local_rank()).bytes);
    if (!has_output()) buffer_ = builder_.more_scratch(kTurns * buffer_bytes_);
    if (is_widened()) partials_ = builder_.more_scratch(kTurns * builder_.widened(buffer_bytes_));
    for (size_t turn = 0; turn < chunks_ + 2; ++turn) {
      if (turn < chunks_) reduce_on_host(turn);
      if (turn < chunks_) exchange_shares(turn);
      if (turn >= 1 && turn - 1 < chunks_) reduce_shares(turn - 1);
      if (turn >= 2) give_results(turn - 2);
    }
  }

 private:
  // Of a chunk: a region in this rank's segment, and the part of it that each host reduces.
  struct Region {
    Range range;  // in the chunk
    std::vector<int> owners;
  };

  size_t start(size_t chunk) const { return chunk * chunk_; }
  size_t length(size_t chunk) const { return std::min(chunk_, builder_.request().bytes - start(chunk)); }
  Range segment(size_t chunk, int host, int index) const {
    return block_of(length(chunk), builder_.request().element_bytes, static_cast<int>(topology_.ranks_on(host).size()),
                    index);
  }
  Range own_segment(size_t chunk) const { return segment(chunk, builder_.own_host(), builder_.local_rank()); }
  // The share of a region that a host reduces, from the beginning of the chunk.
  Range share(const Region& region, int host) const {
    const Range part = block_of(region.range.bytes, builder_.request().element_bytes, builder_.hosts(), host);
    return {region.range.offset + part.offset, part.bytes};
  }
  size_t own_shares(size_t chunk) const {
    size_t bytes = 0;
    for (const Region& region : regions(chunk)) bytes += share(region, builder_.own_host()).bytes;
    return bytes;
  }
  const std::vector<Region>& regions(size_t chunk) const { return chunk + 1 < chunks_ ? whole_ : last_; }
  std::vector<Region> regions_of(size_t chunk) const;

  bool is_root() const { return builder_.rank() == root_; }
  bool has_output() const { return root_ < 0 || is_root(); }
  bool is_root_host() const { return root_ >= 0 && topology_.host_of(root_) == builder_.own_host(); }
  // Where this rank has its segment's result, by offset in the chunk.
  Place result(size_t chunk, size_t offset) const {
    if (has_output()) return output(start(chunk) + offset);
    return scratch(buffer_ + chunk % kTurns * buffer_bytes_ + offset - own_segment(chunk).offset);
  }
  // Where it has its host's partial results.
  Place partial(size_t chunk, size_t offset) const {
    if (is_widened())
      return scratch(partials_ + builder_.widened(chunk % kTurns * buffer_bytes_ + offset - own_segment(chunk).offset));
    return builder_.is_alone() ? input(start(chunk) + offset) : result(chunk, offset);
  }
  bool is_widened() const { return builder_.request().widening > 1; }

  void reduce_on_host(size_t chunk);
  void exchange_shares(size_t chunk);
  void reduce_shares(size_t chunk);
  void give_results(size_t chunk);

  Builder& builder_;
  const Topology& topology_;
  const size_t chunk_;
  const size_t chunks_;
  const int root_;
  std::vector<Region> whole_;  // of a chunk of full length
  std::vector<Region> last_;   // of the last one
  size_t source_bytes_ = 0;
  size_t buffer_bytes_ = 0;
  size_t buffer_ = 0;
  size_t partials_ = 0;
};

std::vector<ReductionSchedule::Region> ReductionSchedule::regions_of(size_t chunk) const {
  const Range own = own_segment(chunk);
  std::vector<size_t> cuts = {own.offset, own.offset + own.bytes};
  for (int host = 0; host < builder_.hosts(); ++host) {
    for (size_t index = 0; index < topology_.ranks_on(host).size(); ++index) {
      const size_t cut = segment(chunk, host, static_cast<int>(index)).offset;
      if (cut > own.offset && cut < own.offset + own.bytes) cuts.push_back(cut);
    }
  }
  std::ranges::sort(cuts);
  std::vector<Region> found;
  for (size_t cut = 0; cut + 1 < cuts.size(); ++cut) {
    const Range range{cuts[cut], cuts[cut + 1] - cuts[cut]};
    if (range.bytes == 0) continue;
    Region region{range, {}};
    for (int host = 0; host < builder_.hosts(); ++host) {
      int index = 0;
      while (segment(chunk, host, index).offset + segment(chunk, host, index).bytes <= range.offset) ++index;
      region.owners.push_back(topology_.ranks_on(host)[static_cast<size_t>(index)]);
    }
    found.push_back(std::move(region));
  }
  return found;
}

void ReductionSchedule::reduce_on_host(size_t chunk) {
  const Range own = own_segment(chunk);
  builder_.round(
      [&] {  // all but the own segment, which nobody else reads
        const size_t behind = own.offset + own.bytes;
        builder_.copy(builder_.own_slot(), input(start(chunk)), own.offset);
        builder_.copy(builder_.own_slot(behind), input(start(chunk) + behind), length(chunk) - behind);
      },
      [&] {
        builder_.reduce_slots(partial(chunk, own.offset), own.offset, input(start(chunk) + own.offset), own.bytes);
      });
}

void ReductionSchedule::exchange_shares(size_t chunk) {
  size_t offset = chunk % 2 * builder_.widened(source_bytes_);
  for (const Region& region : regions(chunk)) {
    const Range own = share(region, builder_.own_host());
    for (int distance = 1; distance < builder_.hosts(); ++distance) {
      const int source = builder_.host_at(-distance);
      const int target = builder_.host_at(distance);
      const Range theirs = share(region, target);
      builder_.receive(region.owners[static_cast<size_t>(source)], builder_.from_host(source, offset),
                       builder_.widened(own.bytes));
      builder_.send(region.owners[static_cast<size_t>(target)], partial(chunk, theirs.offset),
                    builder_.widened(theirs.bytes));
    }
    offset += builder_.widened(own.bytes);
  }
}

void ReductionSchedule::reduce_shares(size_t chunk) {
  size_t offset = chunk % 2 * builder_.widened(source_bytes_);
  for (const Region& region : regions(chunk)) {
    const Range own = share(region, builder_.own_host());
    builder_.reduce_hosts(result(chunk, own.offset), offset, partial(chunk, own.offset), own.bytes);
    offset += builder_.widened(own.bytes);
    for (int distance = 1; distance < builder_.hosts(); ++distance) {
      const int source = builder_.host_at(-distance);
      const int target = builder_.host_at(distance);
      const Range theirs = share(region, source);
      if (root_ < 0 || is_root_host())
        builder_.receive(region.owners[static_cast<size_t>(source)], result(chunk, theirs.offset), theirs.bytes);
      if (root_ < 0 || topology_.host_of(root_) == target)
        builder_.send(region.owners[static_cast<size_t>(target)], result(chunk, own.offset), own.bytes);
    }
  }
}

void ReductionSchedule::give_results(size_t chunk) {
  if (root_ >= 0 && !is_root_host()) return;
  const Range own = own_segment(chunk);
  builder_.round(
      [&] {
        if (!is_root()) builder_.copy(builder_.own_slot(), result(chunk, own.offset), own.bytes);
      },
      [&] {
        for (int step = 1; has_output() && step < builder_.local_size(); ++step) {
          const int peer = (builder_.local_rank() + step) % builder_.local_size();
          const Range theirs = segment(chunk, builder_.own_host(), peer);
          builder_.copy(output(start(chunk) + theirs.offset), builder_.slot(peer), theirs.bytes);
        }
      });
}

// The part of a block that one round moves.
Range part_of(size_t bytes, size_t round, size_t part) {
  const size_t begin = std::min(bytes, round * part);
  return {begin, std::min(part, bytes - begin)};
}

size_t rounds_for(size_t bytes, size_t part) { return (bytes + part - 1) / part; }

void schedule_reduce_scatter(Builder& builder) {
  const HierarchicalScheduleRequest& request = builder.request();
  const Topology& topology = request.topology;
  const size_t part = builder.whole_elements(request.chunk_bytes / static_cast<size_t>(builder.size()));
  const size_t rounds = rounds_for(request.blocks.largest(), part);
  const auto own_agent = [&](int to) { return topology.is_local(to) ? to : builder.agent_on(builder.own_host(), to); };
  const auto range = [&](int to, size_t round) { return part_of(request.blocks.between(to, to), round, part); };
  const size_t widened = builder.widened(part);
  const size_t parts = 2 * static_cast<size_t>(builder.size());
  builder.reserve_sources(2 * widened);
  const size_t buffer = builder.more_scratch(builder.has_partial_input() ? 0 : parts * widened);
  const auto partial = [&](int to, size_t round) {
    const size_t offset = range(to, round).offset;
    if (builder.has_partial_input()) return input(offset, to);
    if (to == builder.rank() && widened == part) return output(offset);
    return scratch(buffer + (round % 2 * static_cast<size_t>(builder.size()) + static_cast<size_t>(to)) * widened);
  };
  const auto lane = [&](int to) { return static_cast<size_t>(to) * part; };
  for (size_t round = 0; round <= rounds; ++round) {
    if (round < rounds) {
      builder.round(
          [&] {
            for (int to = 0; to < builder.size(); ++to)
              if (own_agent(to) != builder.rank())
                builder.copy(builder.own_slot(lane(to)), input(range(to, round).offset, to), range(to, round).bytes);
          },
          [&] {
            for (int to = 0; to < builder.size(); ++to)
              if (own_agent(to) == builder.rank())
                builder.reduce_slots(partial(to, round), lane(to), input(range(to, round).offset, to),
                                     range(to, round).bytes);
          });
      for (int to = 0; to < builder.size(); ++to) {
        const size_t bytes = builder.widened(range(to, round).bytes);
        if (to == builder.rank()) {
          for (int host = 0; host < builder.hosts(); ++host)
            if (host != builder.own_host())
              builder.receive(builder.agent_on(host, to), builder.from_host(host, round % 2 * widened), bytes);
        } else if (!topology.is_local(to) && own_agent(to) == builder.rank()) {
          builder.send(to, partial(to, round), bytes);
        }
      }
    }
    if (round == 0) continue;
    const Range own = range(builder.rank(), round - 1);
    builder.reduce_hosts(output(own.offset), (round - 1) % 2 * widened, partial(builder.rank(), round - 1), own.bytes);
  }
}

// The ranks of other hosts for which a rank of a host acts there, in order.
std::vector<int> clients_of(const Builder& builder, int agent) {
  const Topology& topology = builder.request().topology;
  std::vector<int> clients;
  for (int rank = 0; rank < builder.size(); ++rank)
    if (topology.host_of(rank) != topology.host_of(agent) && builder.agent_on(topology.host_of(agent), rank) == agent)
      clients.push_back(rank);
  return clients;
}

void schedule_all_gather(Builder& builder) {
  const HierarchicalScheduleRequest& request = builder.request();
  const Topology& topology = request.topology;
  size_t lanes = 1;  // of a slot: the own block's, and one for each client's
  for (int rank = 0; rank < builder.size(); ++rank) lanes = std::max(lanes, 1 + clients_of(builder, rank).size());
  const size_t part = builder.whole_elements(request.chunk_bytes / lanes);
  const size_t rounds = rounds_for(request.blocks.largest(), part);
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
    builder.round(
        [&] {
          each_part(builder.local_rank(), [&](int from, Range moves, size_t offset) {
            const Place source = from == builder.rank() ? input(moves.offset) : output(moves.offset, from);
            builder.copy(builder.own_slot(offset), source, moves.bytes);
          });
        },
        [&] {
          for (int step = 1; step < builder.local_size(); ++step) {
            const int peer = (builder.local_rank() + step) % builder.local_size();
            each_part(peer, [&](int from, Range moves, size_t offset) {
              builder.copy(output(moves.offset, from), builder.slot(peer, offset), moves.bytes);
            });
          }
        });
  }
}

void schedule_broadcast(Builder& builder) {
  const HierarchicalScheduleRequest& request = builder.request();
  const Topology& topology = request.topology;
  const size_t chunk = builder.whole_elements(request.chunk_bytes);
  const size_t chunks = rounds_for(request.bytes, chunk);
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
    builder.round(
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
void schedule_pairs(Builder& builder, bool has_input_blocks, bool has_output_blocks) {
  const HierarchicalScheduleRequest& request = builder.request();
  const Topology& topology = request.topology;
  const std::vector<int>& local = topology.local_ranks();
  const auto given = [&](int to, size_t offset) { return input(offset, has_input_blocks ? to : 0); };
  const auto taken = [&](int from, size_t offset) { return output(offset, has_output_blocks ? from : 0); };
  // With a root, only what it gives (scatter) or takes (gather).
  const auto between = [&](int from, int to) {
    const bool moves = request.root < 0 || (has_input_blocks ? from : to) == request.root;
    return moves ? request.blocks.between(from, to) : 0;
  };
  const int own = builder.rank();
  builder.copy(taken(own, 0), given(own, 0), between(own, own));
  const size_t segment = builder.whole_elements(request.segment_bytes);
  const size_t lanes = std::max<size_t>(local.size() - 1, 1);
  const size_t part = builder.whole_elements(request.chunk_bytes / lanes);
  size_t largest_local = 0;  // of all pairs of this host, so that all its ranks make as many rounds
  size_t largest_remote = 0;
  for (const int from : local)
    for (const int to : local)
      if (from != to) largest_local = std::max(largest_local, between(from, to));
  for (int peer = 0; peer < builder.size(); ++peer)
    if (!topology.is_local(peer)) largest_remote = std::max({largest_remote, between(own, peer), between(peer, own)});
  const size_t rounds = rounds_for(largest_local, part);
  const size_t messages = rounds_for(largest_remote, segment);
  const auto lane = [&](int reader, int owner) {
    return static_cast<size_t>((reader - owner - 1 + builder.local_size()) % builder.local_size()) * part;
  };
  for (size_t turn = 0; turn < std::max(rounds, messages); ++turn) {
    for (int distance = 1; distance < builder.size() && turn < messages; ++distance) {
      const int source = (own - distance + builder.size()) % builder.size();
      const int target = (own + distance) % builder.size();
      const Range taken_part = part_of(between(source, own), turn, segment);
      const Range given_part = part_of(between(own, target), turn, segment);
      if (!topology.is_local(source)) builder.receive(source, taken(source, taken_part.offset), taken_part.bytes);
      if (!topology.is_local(target)) builder.send(target, given(target, given_part.offset), given_part.bytes);
    }
    if (turn >= rounds) continue;
    const auto each_peer = [&](const auto& visit) {
      for (int step = 1; step < builder.local_size(); ++step) {
        const int index = (builder.local_rank() + step) % builder.local_size();
        visit(index, local[static_cast<size_t>(index)]);
      }
    };
    builder.round(
        [&] {
          each_peer([&](int index, int to) {
            const Range moves = part_of(between(own, to), turn, part);
            builder.copy(builder.own_slot(lane(index, builder.local_rank())), given(to, moves.offset), moves.bytes);
          });
        },
        [&] {
          each_peer([&](int index, int from) {
            const Range moves = part_of(between(from, own), turn, part);
            builder.copy(taken(from, moves.offset), builder.slot(index, lane(builder.local_rank(), index)),
                         moves.bytes);
          });
        });
  }
}

}  // namespace

bool has_hierarchical_schedule(OpKind op) {
  switch (op) {
    case OpKind::kBroadcast:
    case OpKind::kReduce:
    case OpKind::kAllReduce:
    case OpKind::kGather:
    case OpKind::kAllGather:
    case OpKind::kScatter:
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
      return true;
    default:
      return false;
  }
}

void schedule_hierarchical(OpKind op, const HierarchicalScheduleRequest& request, Schedule& schedule) {
  Builder builder(request, schedule);
  switch (op) {
    case OpKind::kReduce:
    case OpKind::kAllReduce:
      return ReductionSchedule(builder).write();
    case OpKind::kReduceScatter:
      return schedule_reduce_scatter(builder);
    case OpKind::kAllGather:
      return schedule_all_gather(builder);
    case OpKind::kBroadcast:
      return schedule_broadcast(builder);
    case OpKind::kGather:
      return schedule_pairs(builder, false, true);
    case OpKind::kScatter:
      return schedule_pairs(builder, true, false);
    case OpKind::kAllToAll:
      return schedule_pairs(builder, true, true);
    default:
      return;
  }
}

}  // namespace procgroup
