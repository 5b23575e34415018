// The hierarchical schedules that reduce: on each host first, and then between the hosts.
#include <algorithm>
#include <vector>

#include "schedules/hierarchical_builder.hpp"

namespace procgroup {
namespace {

// Buffers of a chunk that is reduced, sent and copied out in three turns of the pipeline.
constexpr size_t kTurns = 3;

// all_reduce, and with a root reduce.
class ReductionSchedule {
 public:
  explicit ReductionSchedule(HierarchicalBuilder& builder)
      : builder_(builder),
        topology_(builder.request().topology),
        chunk_(builder.whole_elements(builder.request().chunk_bytes)),
        chunks_(parts_of(builder.request().bytes, chunk_)),
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

  HierarchicalBuilder& builder_;
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
  builder_.run_round(
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
      builder_.receive(region.owners[static_cast<size_t>(source)], scratch(offset, source),
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
  builder_.run_round(
      [&] {
        if (!is_root()) builder_.copy(builder_.own_slot(), result(chunk, own.offset), own.bytes);
      },
      [&] {
        if (!has_output()) return;
        builder_.for_each_peer([&](int peer) {
          const Range theirs = segment(chunk, builder_.own_host(), peer);
          builder_.copy(output(start(chunk) + theirs.offset), builder_.slot(peer), theirs.bytes);
        });
      });
}

}  // namespace

void schedule_hierarchical_reduction(HierarchicalBuilder& builder) { ReductionSchedule(builder).write(); }

void schedule_hierarchical_reduce_scatter(HierarchicalBuilder& builder) {
  const ScheduleRequest& request = builder.request();
  const Topology& topology = request.topology;
  const size_t part = builder.whole_elements(request.chunk_bytes / static_cast<size_t>(builder.size()));
  const size_t rounds = parts_of(request.blocks.largest(), part);
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
      builder.run_round(
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
              builder.receive(builder.agent_on(host, to), scratch(round % 2 * widened, host), bytes);
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

}  // namespace procgroup
