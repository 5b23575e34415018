#include "runtime/failure_record.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace procgroup {
namespace {

size_t bitmap_bytes(uint32_t ranks) { return (size_t{ranks} + 7) / 8; }

}  // namespace

FailureHead head_of(const Failure& failure, int ranks) {
  FailureHead head{};
  head.kind = failure.kind;
  head.cause = failure.cause;
  head.sudden = failure.sudden;
  head.text_bytes = static_cast<uint16_t>(std::min(failure.reason.size(), kFailureTextBytes));
  head.peer = failure.peer;
  head.ranks = failure.missing.empty() ? 0 : static_cast<uint32_t>(ranks);
  head.pid = failure.pid;
  head.seconds = failure.seconds;
  head.call = failure.call;
  std::copy_n(failure.host.begin(), std::min(failure.host.size(), kHostBytes - 1), head.host.begin());
  return head;
}

std::vector<std::byte> details_of(const Failure& failure, int ranks) {
  const FailureHead head = head_of(failure, ranks);
  std::vector<std::byte> details(details_bytes(head));
  for (const int missing : failure.missing) {
    if (missing < 0 || missing >= ranks) continue;
    const auto index = static_cast<size_t>(missing);
    details[index / 8] |= std::byte{1} << (index % 8);
  }
  if (head.text_bytes != 0)
    std::memcpy(details.data() + bitmap_bytes(head.ranks), failure.reason.data(), head.text_bytes);
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
  const bool is_possible = head.kind <= Failure::Kind::kDeadlock && head.cause <= Failure::Kind::kDeadlock &&
                           head.peer >= -1 && head.peer < ranks && head.text_bytes <= kFailureTextBytes &&
                           (head.ranks == 0 || head.ranks == static_cast<uint32_t>(ranks));
  if (!is_possible) return std::nullopt;
  Failure failure{.kind = head.kind, .peer = head.peer, .pid = head.pid, .seconds = head.seconds};
  failure.cause = head.cause;
  failure.sudden = head.sudden != 0;
  failure.host = readable(head.host.data(), kHostBytes);
  failure.call = Descriptor::copied_from(&head.call);
  if (details.size() < details_bytes(head)) return failure;
  for (uint32_t rank = 0; rank < head.ranks; ++rank)
    if ((details[rank / 8] & std::byte{1} << (rank % 8)) != std::byte{0})
      failure.missing.push_back(static_cast<int>(rank));
  if (head.text_bytes == 0) return failure;
  const std::byte* text = details.data() + bitmap_bytes(head.ranks);
  failure.reason = readable(reinterpret_cast<const char*>(text), head.text_bytes);
  return failure;
}

std::optional<Failure> decode(std::span<const std::byte> record, int ranks) {
  FailureHead head;
  if (record.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, record.data(), sizeof head);
  return decode(head, record.subspan(sizeof head), ranks);
}

}  // namespace procgroup
