// Arrays of bytes in several blocks of memory: copies of them, and calls that take them.
#include <random>
#include <string>
#include <vector>

#include "tests/engine_fixture.hpp"

using namespace procgroup;

namespace {

using Bytes = std::vector<std::byte>;

constexpr std::byte kGap{0xEE};

// An array in several places of random lengths, some of none, with gaps between some.
struct Scattered {
  Bytes whole;  // kGap between iovecs
  std::vector<Bytes> memory;
  std::vector<Iovec> iovecs;

  Scattered(unsigned seed, size_t count, size_t longest) {
    std::mt19937 random(seed);
    for (size_t index = 0; index < count; ++index) {
      Bytes& iovec = memory.emplace_back(random() % (longest + 1));
      for (std::byte& byte : iovec) byte = std::byte(random() % 200);
      if (!iovec.empty()) iovecs.push_back({whole.size(), iovec.size(), iovec.data()});
      whole.insert(whole.end(), iovec.begin(), iovec.end());
      whole.insert(whole.end(), random() % 3 * 32, kGap);
    }
  }
  // Whether the received bytes are those of every iovec; bytes between iovecs are not compared.
  bool equals(const Bytes& received) const {
    if (received.size() != whole.size()) return false;
    for (size_t index = 0; index < whole.size(); ++index)
      if (whole[index] != kGap && whole[index] != received[index]) return false;
    return true;
  }
};

void every_range_of_an_array_is_copied() {
  const Scattered array(1, 9, 40);
  const size_t size = array.whole.size();
  for (size_t begin = 0; begin <= size; ++begin) {
    for (size_t end = begin; end <= size; ++end) {
      CASE("bytes %zu to %zu", begin, end);
      Bytes copied(end - begin, kGap);
      copy_iovecs(copied.data(), array.iovecs, begin, end - begin, copy_cached);
      const auto first = array.whole.begin() + static_cast<std::ptrdiff_t>(begin);
      check(std::equal(copied.begin(), copied.end(), first), "expected the iovecs in this range", 0);
    }
    const std::span<const std::byte> run = contiguous_run(array.iovecs, begin);
    const bool in_gap = begin == size || array.whole[begin] == kGap;
    check(run.empty() == in_gap, "expected a run where there are bytes", 0);
    check(begin + run.size() <= size && std::equal(run.begin(), run.end(), &array.whole[0] + begin), "the bytes there",
          0);
    check(run.empty() || contiguous_run(array.iovecs, begin + run.size()).data() != run.data() + run.size(),
          "all of it", 0);
  }
}

Request request_of(OpKind op, const Scattered& array, int root) {
  Request request;
  request.descriptor.op = op;
  request.descriptor.dtype = Dtype::kUint8;
  request.descriptor.count = array.whole.size();
  request.descriptor.root = root;
  request.iovecs = array.iovecs;
  return request;
}

// Through the caller's thread, or through the queue.
void run(Group& group, Request& request, bool queued) {
  NoRuntime language;
  if (!queued) return group.calls().run(request, 60, language);
  const auto operation = group.calls().start(request, 60);
  while (!operation->is_completed()) std::this_thread::yield();
  check(operation->failure() == nullptr, "expected to end well", group.rank());
}

struct Case {
  int size;
  ReadingRanges reading{};
  std::vector<int> hosts{};
  GroupLayout layout = kTiny;
  size_t small_bytes = kTiny.small_bytes;
  size_t scale = 1;
};

void broadcast(Group& group, const Scattered& array, bool queued, size_t small_bytes) {
  const int root = group.size() - 1;
  Bytes received(array.whole.size());
  Request request = request_of(OpKind::kBroadcast, array, root);
  if (group.rank() != root || !group.calls().takes_iovecs(request.descriptor)) {
    if (group.rank() == root) received = array.whole;
    request.iovecs.clear();
    request.input = request.output = received.data();
  }
  check(group.calls().takes_iovecs(request.descriptor) == (array.whole.size() > small_bytes), "takes", group.rank());
  run(group, request, queued);
  if (group.rank() != root) check(array.equals(received), "broadcast", group.rank());
}

void all_gather(Group& group, const std::vector<Scattered>& arrays, bool queued) {
  Request request = request_of(OpKind::kAllGather, arrays[static_cast<size_t>(group.rank())], -1);
  request.descriptor.count = 0;
  request.descriptor.splits = 5;
  std::vector<Bytes> received;
  for (const Scattered& array : arrays) {
    received.emplace_back(array.whole.size());
    request.descriptor.count += array.whole.size();
  }
  for (Bytes& bytes : received) request.outputs.push_back({bytes.data(), bytes.size()});
  run(group, request, queued);
  for (size_t rank = 0; rank < arrays.size(); ++rank)
    check(arrays[rank].equals(received[rank]), "all_gather", group.rank());
}

void calls_take_iovecs(const Case& wanted) {
  CASE("%d ranks, %s, scale %zu", wanted.size, text_of(wanted.hosts).c_str(), wanted.scale);
  std::vector<Rank> world = make_world(wanted.size, wanted.reading, wanted.layout, wanted.hosts);
  in_all_ranks(world, [&](Group& group) {
    for (unsigned round = 0; round < 12; ++round) {
      CASE("round %u", round);
      broadcast(group, Scattered(round, 40, wanted.scale * (50 + 100 * round)), round % 3 == 1, wanted.small_bytes);
      std::vector<Scattered> arrays;
      for (int rank = 0; rank < wanted.size; ++rank)
        arrays.emplace_back(100 * round + static_cast<unsigned>(rank), 30, wanted.scale * (40 + 90 * round));
      all_gather(group, arrays, round % 3 == 2);
    }
  });
}

// Messages of several frames, and a peer that exposes contiguous arrays.
constexpr size_t kLargeScale = 25;

}  // namespace

int main() {
  RUN_TEST(every_range_of_an_array_is_copied);
  for (const int size : {2, 3, 4}) {
    RUN_TEST(calls_take_iovecs, {.size = size});
    // Where arrays are read, those in several places are not.
    RUN_TEST(calls_take_iovecs, {.size = size, .reading = ReadingRanges::all({.from = 0})});
    std::vector<int> hosts(static_cast<size_t>(size));
    std::iota(hosts.begin(), hosts.end(), 0);
    const Case elsewhere{
        .size = size, .hosts = hosts, .layout = {}, .small_bytes = MessageLimits{}.small_bytes, .scale = kLargeScale};
    RUN_TEST(calls_take_iovecs, elsewhere);
    Case in_part = elsewhere;
    in_part.hosts.back() = 0;
    if (size > 2) RUN_TEST(calls_take_iovecs, in_part);
  }
}
