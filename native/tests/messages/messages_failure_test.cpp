// Messages that differ in size, are cancelled, or whose peer is lost.
#include <algorithm>
#include <memory>
#include <vector>

#include "tests/check.hpp"
#include "tests/links.hpp"
#include "tests/messages/messages_fixture.hpp"

namespace procgroup::testing {
namespace {

void a_size_that_differs_fails_that_receive_and_nothing_else() {
  for (const size_t size : {size_t{8}, 2 * kEagerBytes}) {
    for (const bool receive_first : {true, false}) {
      CASE("%zu bytes, receive first %d", size, receive_first);
      Pair pair;
      const Bytes sent = pattern(size, 1);
      Bytes into(size + 1);
      TransferPtr receive;
      if (receive_first) receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
      auto send = pair.first.send(1, {1, 1}, sent.data(), size);
      pair.settle();
      if (!receive_first) receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
      pair.settle();
      CHECK(failed_as<Mismatch>(receive) && receive->failure()->as<Mismatch>()->peer == 0);
      CHECK(receive->failure()->as<Mismatch>()->reason.find(std::to_string(size)) != std::string::npos);
      CHECK(size <= kEagerBytes ? succeeded(send) : failed_as<Failed>(send));
      CHECK(std::all_of(into.begin(), into.end(), [](unsigned char byte) { return byte == 0; }));
      auto next = pair.first.send(1, {1, 1}, sent.data(), size);
      auto good = pair.second.receive(0, {1, 1}, into.data(), size);
      pair.settle();
      CHECK(succeeded(next) && succeeded(good));
    }
  }
}

void a_cancelled_receive_leaves_its_message_for_the_next() {
  Pair pair;
  int value = 5;
  int into[2] = {0, 0};
  auto cancelled = pair.second.receive(0, {1, 1}, &into[0], sizeof(int));
  pair.second.cancel(*cancelled, kCancelled);
  CHECK(failed_as<Timeout>(cancelled) && cancelled->failure()->as<Timeout>()->seconds == 1.5);
  pair.first.send(1, {1, 1}, &value, sizeof value);
  auto next = pair.second.receive(0, {1, 1}, &into[1], sizeof(int));
  pair.settle();
  CHECK(succeeded(next) && into[0] == 0 && into[1] == 5);
}

void a_cancelled_announcement_was_never_sent() {
  Pair pair;
  const Bytes large = pattern(kMiB, 1);
  const Bytes second = pattern(kMiB, 2);
  Bytes into(kMiB);
  auto cancelled = pair.first.send(1, {1, 1}, large.data(), large.size());
  pair.settle();
  pair.first.cancel(*cancelled, kCancelled);
  pair.settle();
  auto send = pair.first.send(1, {1, 1}, second.data(), second.size());
  auto receive = pair.second.receive(0, {1, 1}, into.data(), into.size());
  pair.settle();
  CHECK(failed_as<Timeout>(cancelled) && succeeded(send) && succeeded(receive) && into == second);
  CHECK(pair.first.flushed());
}

// The buffers are freed right after the cancel: a sanitizer reports a late access.
void a_stream_cancelled_on_either_side_fails_both_and_the_channel_lives() {
  for (const bool sender_cancels : {true, false}) {
    CASE("the %s cancels", sender_cancels ? "sender" : "receiver");
    Pair pair(LinkKind::kRing);
    auto large = std::make_unique<Bytes>(pattern(8 * kMiB, 1));
    auto into = std::make_unique<Bytes>(8 * kMiB);
    auto receive = pair.second.receive(0, {1, 1}, into->data(), into->size());
    auto send = pair.first.send(1, {1, 1}, large->data(), large->size());
    for (int round = 0; round < 5; ++round) CHECK(int{pair.first.pump()} + int{pair.second.pump()} > 0);
    CHECK(!send->is_completed() && !receive->is_completed());
    if (sender_cancels) {
      pair.first.cancel(*send, kCancelled);
      large.reset();
    } else {
      pair.second.cancel(*receive, kCancelled);
      into.reset();
    }
    pair.settle();
    CHECK(send->failure() != nullptr && receive->failure() != nullptr);
    CHECK(failed_as<Failed>(sender_cancels ? receive : send));
    int value = 3;
    int got = 0;
    pair.first.send(1, {1, 1}, &value, sizeof value);
    auto next = pair.second.receive(0, {1, 1}, &got, sizeof got);
    pair.settle();
    CHECK(succeeded(next) && got == 3 && pair.first.flushed() && pair.second.flushed());
  }
}

void a_cancelled_eager_send_that_was_half_written_keeps_the_frames_whole() {
  Links links(2, 1024);
  ChannelPair ends = links.connect(LinkKind::kRing, 0, 1);
  Messages first(0, 2);
  Messages second(1, 2);
  first.attach(1, std::move(ends.first));
  second.attach(0, std::move(ends.second));
  auto data = std::make_unique<Bytes>(pattern(kEagerBytes, 1));
  auto send = first.send(1, {1, 1}, data->data(), data->size());
  CHECK(!send->is_completed());
  first.cancel(*send, kCancelled);
  data.reset();
  int value = 4;
  int got = 0;
  first.send(1, {1, 2}, &value, sizeof value);
  auto receive = second.receive(0, {1, 2}, &got, sizeof got);
  while (!receive->is_completed()) CHECK(int{first.pump()} + int{second.pump()} > 0);
  CHECK(got == 4);
}

void a_channel_that_closes_in_mid_message_fails_that_peer() {
  for (const size_t size : {size_t{1000}, 2 * kEagerBytes}) {
    CASE("%zu bytes", size);
    Victim victim;
    Bytes into(size);
    int never = 0;
    auto receive = victim.messages.receive(1, {1, 1}, into.data(), size);
    const std::vector<int> sources{1};
    auto any = victim.messages.receive(kAnySource, {1, 7}, &never, sizeof never, &sources);
    const bool eager = size <= kEagerBytes;
    FrameHeader header{.kind = eager ? FrameKind::kEager : FrameKind::kAnnounce, .key = {1, 1}, .bytes = size};
    victim.write(header);
    if (!eager) victim.write({.kind = FrameKind::kData, .bytes = size});
    victim.write(into.data(), size / 2);
    victim.settle();
    CHECK(!receive->is_completed());
    victim.raw.reset();
    victim.settle();
    CHECK(failed_as<Lost>(receive) && receive->failure()->as<Lost>()->peer == 1);
    CHECK(failed_as<Lost>(any));
    CHECK(failed_as<Lost>(victim.messages.send(1, {1, 2}, &never, sizeof never)));
    CHECK(failed_as<Lost>(victim.messages.receive(1, {1, 2}, &never, sizeof never)));
    victim.check_that_rank_2_is_unharmed();
  }
}

void what_arrived_before_the_end_is_still_received() {
  for (const bool told_first : {true, false}) {
    CASE("told first %d", told_first);
    Victim victim;
    int value = 6;
    int got = 0;
    const FrameHeader header{.kind = FrameKind::kEager, .key = {1, 1}, .bytes = sizeof value};
    CHECK(victim.raw->write_some(&header, sizeof header) == sizeof header);
    CHECK(victim.raw->write_some(&value, sizeof value) == sizeof value);
    victim.raw.reset();
    if (told_first) victim.messages.fail_peer(1, Lost{.pid = 77});
    victim.settle();
    CHECK(succeeded(victim.messages.receive(1, {1, 1}, &got, sizeof got)) && got == 6);
    auto next = victim.messages.receive(1, {1, 1}, &got, sizeof got);
    CHECK(failed_as<Lost>(next) && (next->failure()->as<Lost>()->pid == 77) == told_first);
  }
}

// The end of the channel may be seen before the peer's exit record, which is in shared memory.
void a_channel_that_ends_fails_with_the_peers_exit_record() {
  Victim victim;
  int got = 0;
  const Failure raised = Failed{.peer = 1, .reason = "ValueError: no file"};
  victim.messages.read_ends_with([&](int peer) { return peer == 1 ? std::optional(raised) : std::nullopt; });
  auto receive = victim.messages.receive(1, {1, 1}, &got, sizeof got);
  victim.raw.reset();
  victim.settle();
  CHECK(failed_as<Failed>(receive) && receive->failure()->as<Failed>()->reason == raised.reason());
  victim.check_that_rank_2_is_unharmed();
}

void fail_peer_fails_every_transfer_with_it() {
  Pair pair;
  const Bytes large = pattern(kMiB, 1);
  Bytes into(kMiB);
  auto announced = pair.first.send(1, {1, 1}, large.data(), large.size());
  auto posted = pair.first.receive(1, {1, 2}, into.data(), into.size());
  auto any = pair.first.receive(kAnySource, {1, 3}, into.data(), into.size());
  pair.settle();
  pair.first.fail_peer(1, Lost{.pid = 99});
  for (const auto& transfer : {announced, posted, any}) {
    CHECK(failed_as<Lost>(transfer) && transfer->failure()->as<Lost>()->pid == 99);
  }
  CHECK(!pair.first.attached(1) && pair.first.flushed());
}

void any_source_survives_while_one_source_lives() {
  Victim victim;
  int got = 0;
  auto any = victim.messages.receive(kAnySource, {1, 1}, &got, sizeof got);
  victim.raw.reset();
  victim.settle();
  CHECK(!any->is_completed());
  int value = 8;
  victim.friendly.send(0, {1, 1}, &value, sizeof value);
  victim.settle();
  CHECK(succeeded(any) && got == 8 && any->source == 2);
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  limit_seconds(110);
  RUN_TEST(a_size_that_differs_fails_that_receive_and_nothing_else);
  RUN_TEST(a_cancelled_receive_leaves_its_message_for_the_next);
  RUN_TEST(a_cancelled_announcement_was_never_sent);
  RUN_TEST(a_stream_cancelled_on_either_side_fails_both_and_the_channel_lives);
  RUN_TEST(a_cancelled_eager_send_that_was_half_written_keeps_the_frames_whole);
  RUN_TEST(a_channel_that_closes_in_mid_message_fails_that_peer);
  RUN_TEST(what_arrived_before_the_end_is_still_received);
  RUN_TEST(a_channel_that_ends_fails_with_the_peers_exit_record);
  RUN_TEST(fail_peer_fails_every_transfer_with_it);
  RUN_TEST(any_source_survives_while_one_source_lives);
}
