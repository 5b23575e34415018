#include "runtime/failure_record.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace procgroup {
namespace {

size_t bitmap_bytes(uint32_t ranks) { return (size_t{ranks} + 7) / 8; }

// A failure of the kind of the head, with the details that kind has.
Failure make_failure(const FailureHead& head, std::string reason, std::vector<int> missing) {
  std::string host = readable(head.host.data(), kHostBytes);
  switch (head.kind) {
    case FailureKind::kMismatch:
      return Mismatch{.reason = std::move(reason), .peer = head.peer};
    case FailureKind::kTimeout:
      return Timeout{.seconds = head.seconds, .missing = std::move(missing), .reason = std::move(reason)};
    case FailureKind::kLost:
      return Lost{.peer = head.peer, .pid = head.pid, .host = std::move(host), .reason = std::move(reason)};
    case FailureKind::kFailed:
      return Failed{.peer = head.peer,
                    .reason = std::move(reason),
                    .cause = head.cause,
                    .seconds = head.seconds,
                    .missing = std::move(missing),
                    .sudden = head.sudden != 0};
    case FailureKind::kBroken:
      return Broken{std::move(reason)};
    case FailureKind::kInterrupted:
      return Interrupted{};
    case FailureKind::kAborted:
      return Aborted{};
    case FailureKind::kDeadlock:
      return Deadlock{.reason = std::move(reason)};
  }
  return Broken{std::move(reason)};
}

}  // namespace

FailureHead head_of(const Failure& failure, int ranks) {
  FailureHead head{};
  head.kind = failure.kind();
  head.cause = FailureKind::kFailed;
  head.peer = failure.culprit();
  head.text_bytes = static_cast<uint16_t>(std::min(failure.reason().size(), kFailureTextBytes));
  head.ranks = failure.missing().empty() ? 0 : static_cast<uint32_t>(ranks);
  head.call = failure.call;
  if (const auto* timeout = failure.as<Timeout>()) head.seconds = timeout->seconds;
  if (const auto* failed = failure.as<Failed>()) {
    head.cause = failed->cause;
    head.sudden = failed->sudden;
    head.seconds = failed->seconds;
  }
  if (const auto* lost = failure.as<Lost>()) {
    head.pid = lost->pid;
    std::copy_n(lost->host.begin(), std::min(lost->host.size(), kHostBytes - 1), head.host.begin());
  }
  return head;
}

std::vector<std::byte> details_of(const Failure& failure, int ranks) {
  const FailureHead head = head_of(failure, ranks);
  std::vector<std::byte> details(details_bytes(head));
  for (const int missing : failure.missing()) {
    if (missing < 0 || missing >= ranks) continue;
    const auto index = static_cast<size_t>(missing);
    details[index / 8] |= std::byte{1} << (index % 8);
  }
  if (head.text_bytes != 0)
    std::memcpy(details.data() + bitmap_bytes(head.ranks), failure.reason().data(), head.text_bytes);
  return details;
}

std::vector<std::byte> encode(const Failure& failure, int ranks) {
  const FailureHead head = head_of(failure, ranks);
  const std::vector<std::byte> details = details_of(failure, ranks);
  std::vector<std::byte> record(sizeof head + details.size());
  std::memcpy(record.data(), &head, sizeof head);
  std::copy(details.begin(), details.end(), record.begin() + sizeof head);
  return record;
}

size_t largest_record(int ranks) {
  return sizeof(FailureHead) + bitmap_bytes(static_cast<uint32_t>(ranks)) + kFailureTextBytes;
}

size_t details_bytes(const FailureHead& head) { return bitmap_bytes(head.ranks) + head.text_bytes; }

std::optional<Failure> decode(const FailureHead& head, std::span<const std::byte> details, int ranks) {
  const bool is_possible = head.kind <= FailureKind::kDeadlock && head.cause <= FailureKind::kDeadlock &&
                           head.peer >= -1 && head.peer < ranks && head.text_bytes <= kFailureTextBytes &&
                           (head.ranks == 0 || head.ranks == static_cast<uint32_t>(ranks));
  if (!is_possible) return std::nullopt;
  std::vector<int> missing;
  std::string text;
  if (details.size() >= details_bytes(head)) {
    for (uint32_t rank = 0; rank < head.ranks; ++rank)
      if ((details[rank / 8] & std::byte{1} << (rank % 8)) != std::byte{0}) missing.push_back(static_cast<int>(rank));
    if (head.text_bytes != 0)
      text = readable(reinterpret_cast<const char*>(details.data()) + bitmap_bytes(head.ranks), head.text_bytes);
  }
  Failure failure = make_failure(head, std::move(text), std::move(missing));
  failure.call = Descriptor::copied_from(&head.call);
  return failure;
}

std::optional<Failure> decode(std::span<const std::byte> record, int ranks) {
  FailureHead head;
  if (record.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, record.data(), sizeof head);
  return decode(head, record.subspan(sizeof head), ranks);
}

}  // namespace procgroup
