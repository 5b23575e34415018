// What schedules are written with.
#pragma once

#include <algorithm>

#include "schedules/schedule.hpp"

namespace procgroup {

constexpr Place input(size_t offset, int block = 0) {
  return {.kind = Place::Kind::kInput, .rank = block, .offset = offset};
}
constexpr Place output(size_t offset, int block = 0) {
  return {.kind = Place::Kind::kOutput, .rank = block, .offset = offset};
}
constexpr Place scratch(size_t offset, int source = 0) {
  return {.kind = Place::Kind::kScratch, .rank = source, .offset = offset};
}
constexpr Place in_slot(uint64_t index, int rank, size_t offset) {
  return {.kind = Place::Kind::kSlot, .slot = static_cast<int8_t>(index), .rank = rank, .offset = offset};
}
constexpr Place moved(Place place, size_t offset) {
  place.offset += offset;
  return place;
}

// The number of parts of length `part`, and the part at `index`, which is empty behind the end.
constexpr size_t parts_of(size_t bytes, size_t part) { return bytes / part + (bytes % part != 0 ? 1 : 0); }
constexpr Range part_of(size_t bytes, size_t index, size_t part) {
  const size_t begin = std::min(bytes, index * part);
  return {begin, std::min(part, bytes - begin)};
}

// Appends steps to an empty schedule. Steps that would move nothing are left out.
class ScheduleWriter {
 public:
  ScheduleWriter(const ScheduleRequest& request, Schedule& schedule)
      : ScheduleWriter(request, schedule, request.rank, request.size) {}
  // `rank` and `size` say which source of a reduction is this rank's, and how many there are.
  ScheduleWriter(const ScheduleRequest& request, Schedule& schedule, int rank, int size)
      : request_(request), schedule_(schedule), rank_(rank), size_(size) {
    schedule.clear();
  }

  // The others, beginning with the next rank, so that not everybody reads the same memory at once.
  template <class Visit>
  void for_each_peer(Visit visit) const {
    for (int step = 1; step < size_; ++step) visit((rank_ + step) % size_);
  }
  // The most whole elements in so many bytes, at least one.
  size_t whole_elements(size_t bytes) const {
    return std::max(bytes / request_.element_bytes, size_t{1}) * request_.element_bytes;
  }

  void copy(Place to, Place from, size_t bytes) {
    add({.kind = Step::Kind::kCopy, .bytes = bytes, .to = to, .from = from});
  }
  // Own elements are read where the caller has them: they need not be in a slot, and their cache lines are
  // the ones that an in-place result is written to.
  void reduce(Place to, Place from, Place own, size_t bytes) { reduce_from(size_, rank_, to, from, own, bytes); }
  void reduce_from(int sources, int own_source, Place to, Place from, Place own, size_t bytes) {
    add({.kind = Step::Kind::kReduce,
         .sources = sources,
         .own_source = own_source,
         .bytes = bytes,
         .to = to,
         .from = from,
         .own = own});
  }
  // The last reduction is one of two.
  void set_stage(Stage stage, size_t bytes) {
    if (bytes != 0) schedule_.steps.back().stage = stage;
  }
  // The result of the last reduction goes there too.
  void share_result(Place also, size_t bytes) {
    if (bytes == 0) return;
    schedule_.steps.back().also = also;
    schedule_.steps.back().has_also = true;
  }
  void read(Place to, Place from, size_t bytes) {
    add({.kind = Step::Kind::kRead, .bytes = bytes, .to = to, .from = from});
  }
  void read_reduce(Place to, Place from, Place own, size_t bytes) {
    add({.kind = Step::Kind::kReadReduce,
         .sources = size_,
         .own_source = rank_,
         .bytes = bytes,
         .to = to,
         .from = from,
         .own = own});
  }
  void publish(uint64_t value) {
    schedule_.steps.push_back({.kind = Step::Kind::kPublish, .value = value});
    schedule_.published = value;
  }
  void await(int rank, uint64_t value) {
    schedule_.steps.push_back({.kind = Step::Kind::kAwait, .rank = rank, .value = value});
  }
  void send(int rank, Place from, size_t bytes) {
    add({.kind = Step::Kind::kSend, .rank = rank, .bytes = bytes, .from = from});
  }
  void receive(int rank, Place to, size_t bytes) {
    add({.kind = Step::Kind::kReceive, .rank = rank, .bytes = bytes, .to = to});
  }
  // More scratch, behind what there is; its offset.
  size_t more_scratch(size_t bytes) {
    schedule_.scratch_bytes += bytes;
    return schedule_.scratch_bytes - bytes;
  }

 protected:
  const ScheduleRequest& request_;
  Schedule& schedule_;

 private:
  void add(const Step& step) {
    if (step.bytes != 0) schedule_.steps.push_back(step);
  }

  const int rank_;
  const int size_;
};

}  // namespace procgroup
