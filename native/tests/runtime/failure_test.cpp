// What a failure says of ranks, and how it travels to the other ranks.
#include <cstring>
#include <numeric>

#include "runtime/failure_record.hpp"
#include "tests/check.hpp"

using namespace procgroup;

namespace {

std::string said_of(std::vector<int> missing) {
  const std::string text = Failure(Timeout{.seconds = 0.5, .missing = std::move(missing)}).summary();
  const std::string begin = "its time limit of 0.5 s passed";
  CHECK(text.starts_with(begin));
  return text.substr(begin.size());
}

void few_ranks_are_listed() {
  CHECK(said_of({}).empty());
  CHECK(said_of({3}) == " while it waited for rank 3");
  CHECK(said_of({0, 1, 2}) == " while it waited for ranks 0, 1, 2");
  CHECK(said_of({0, 2, 4, 6}) == " while it waited for ranks 0, 2, 4, 6");
}

void a_run_of_ranks_is_one_entry() {
  CHECK(said_of({0, 1, 2, 3}) == " while it waited for ranks 0-3");
  CHECK(said_of({1, 2, 5, 6, 7, 8, 10}) == " while it waited for ranks 1, 2, 5-8, 10");
  std::vector<int> all(100'000);
  std::iota(all.begin(), all.end(), 0);
  CHECK(said_of(all) == " while it waited for ranks 0-99999");
}

void of_many_ranks_apart_the_first_are_listed() {
  std::vector<int> odd;
  for (int rank = 1; rank < 100'000; rank += 2) odd.push_back(rank);
  const std::string text = said_of(odd);
  CHECK(text.size() < 200 && text.starts_with(" while it waited for ranks 1, 3, 5, "));
  CHECK(text.ends_with(" more") && text.find(" and ") != std::string::npos);
}

void a_limit_is_said_with_three_digits() {
  const auto limit_in = [](double seconds) {
    const std::string text = Failure(Timeout{.seconds = seconds}).summary();
    return text.substr(std::strlen("its time limit of "));
  };
  CHECK(limit_in(0.999849) == "1 s passed");
  CHECK(limit_in(599.98) == "600 s passed");
  CHECK(limit_in(1800) == "1800 s passed");
  CHECK(limit_in(0.05) == "0.05 s passed");
}

void ranks_of_a_group_have_their_global_names() {
  const Failure failure = Timeout{.seconds = 2, .missing = {1, 2}};
  const std::string begin = "its time limit of 2 s passed while it waited for ";
  const std::vector<int> odd{1, 3, 5};
  CHECK(failure.summary(&odd) == begin + "ranks 3, 5 (ranks 1, 2 of the group)");
  const std::vector<int> first{0, 1, 2};
  CHECK(failure.summary(&first) == begin + "ranks 1, 2");
}

std::vector<int> every_third(int ranks) {
  std::vector<int> found;
  for (int rank = 2; rank < ranks; rank += 3) found.push_back(rank);
  return found;
}

void a_record_names_every_missing_rank_of_a_group_of_any_size() {
  for (const int ranks : {1, 2, 7, 8, 9, 64, 65, 100'000}) {
    const Failure failure = Timeout{.seconds = 2.5, .missing = every_third(ranks)};
    const std::optional<Failure> read = decode(encode(failure, ranks), ranks);
    CHECK(read && read->is<Timeout>() && read->as<Timeout>()->seconds == 2.5 &&
          read->as<Timeout>()->missing == failure.as<Timeout>()->missing);
  }
}

void a_record_keeps_the_cause_the_call_and_4_kib_of_text() {
  Failure failure = Failed{.peer = 3, .reason = std::string(5000, 'x'), .cause = FailureKind::kTimeout, .sudden = true};
  failure.call.op = OpKind::kAllReduce;
  failure.call.sequence = 17;
  const std::optional<Failure> read = decode(encode(failure, 4), 4);
  CHECK(read && read->is<Failed>());
  const Failed& failed = *read->as<Failed>();
  CHECK(failed.cause == FailureKind::kTimeout && failed.sudden && failed.peer == 3);
  CHECK(failed.reason == std::string(kFailureTextBytes, 'x'));
  CHECK(read->call.op == OpKind::kAllReduce && read->call.sequence == 17);
  CHECK(encode(failure, 4).size() <= largest_record(4));
}

// Each field of each kind that other ranks need.
void every_kind_is_read_as_it_was_written() {
  const std::vector<Failure> all{Mismatch{.reason = "rank 1 gives 5", .peer = 2},
                                 Timeout{.seconds = 2, .missing = {0, 3}, .reason = "its backend"},
                                 Lost{.peer = 1, .pid = 42, .host = "node-7", .reason = "its process ended"},
                                 Failed{.peer = 3, .reason = "no file", .seconds = 1, .missing = {2}},
                                 Broken{"it left"},
                                 Interrupted{},
                                 Aborted{},
                                 Deadlock{.reason = "deadlock: rank 0"}};
  for (const Failure& failure : all) {
    const std::optional<Failure> read = decode(encode(failure, 4), 4);
    CHECK(read && read->kind() == failure.kind() && read->culprit() == failure.culprit());
    CHECK(read->reason() == failure.reason() && read->missing() == failure.missing());
    CHECK(read->summary() == failure.summary());
  }
  CHECK(decode(head_of(Aborted{}, 4), {}, 4)->kind() == FailureKind::kAborted);
}

void its_ranks_are_renumbered() {
  Failure failure = Failed{.peer = 5, .missing = {4, 5, 6}};
  failure.renumber([](int rank) { return rank == 4 ? -1 : rank - 5; });
  CHECK(failure.culprit() == 0 && failure.missing() == (std::vector<int>{0, 1}));
  Failure none = Failed{.peer = -1};
  none.renumber([](int) { return 7; });
  CHECK(none.culprit() == -1 && Failure(Aborted{}).culprit() == -1);
}

void a_record_that_a_hostile_rank_wrote_is_refused_or_made_readable() {
  const Failure failure = Failed{.peer = 1, .reason = "\xff\n", .missing = {0}};
  std::vector<std::byte> record = encode(failure, 2);
  CHECK(decode(record, 2)->reason() == "??");
  for (size_t length = 0; length < record.size(); ++length) {
    const std::optional<Failure> cut = decode(std::span(record).first(length), 2);
    CHECK(length < sizeof(FailureHead) ? !cut : cut->reason().empty() && cut->missing().empty());
  }
  CHECK(!decode(record, 1));  // a rank, and a bitmap, of a larger group
  for (size_t index = 0; index < record.size(); ++index) {
    std::vector<std::byte> changed = record;
    changed[index] = std::byte{0xff};
    static_cast<void>(decode(changed, 2));
  }
  CHECK(!decode(std::vector<std::byte>(record.size(), std::byte{0xff}), 2));
}

void a_loss_is_passed_on_and_everything_else_is_a_failure_of_who_posted_it() {
  const Failure lost = Lost{.peer = 2, .pid = 7, .reason = "its process ended"};
  CHECK(as_seen_by(0, 1, lost, nullptr).is<Lost>() && as_seen_by(0, 1, lost, nullptr).culprit() == 2);
  const Failure of_reader = as_seen_by(2, 1, lost, nullptr);  // who was lost lives, and names who gave it up
  CHECK(of_reader.is<Failed>() && of_reader.as<Failed>()->peer == 1);
  const Failure timeout = Timeout{.seconds = 0.5, .missing = {2}};
  const Failure seen = as_seen_by(0, 1, timeout, nullptr);
  CHECK(seen.is<Failed>() && seen.as<Failed>()->peer == 1 && seen.as<Failed>()->cause == FailureKind::kTimeout);
  CHECK(seen.as<Failed>()->missing == std::vector<int>{2} && seen.as<Failed>()->seconds == 0.5);
  CHECK(seen.as<Failed>()->reason == "its time limit of 0.5 s passed while it waited for rank 2");
}

}  // namespace

int main() {
  RUN_TEST(a_limit_is_said_with_three_digits);
  RUN_TEST(few_ranks_are_listed);
  RUN_TEST(a_run_of_ranks_is_one_entry);
  RUN_TEST(of_many_ranks_apart_the_first_are_listed);
  RUN_TEST(ranks_of_a_group_have_their_global_names);
  RUN_TEST(a_record_names_every_missing_rank_of_a_group_of_any_size);
  RUN_TEST(a_record_keeps_the_cause_the_call_and_4_kib_of_text);
  RUN_TEST(every_kind_is_read_as_it_was_written);
  RUN_TEST(its_ranks_are_renumbered);
  RUN_TEST(a_record_that_a_hostile_rank_wrote_is_refused_or_made_readable);
  RUN_TEST(a_loss_is_passed_on_and_everything_else_is_a_failure_of_who_posted_it);
}
