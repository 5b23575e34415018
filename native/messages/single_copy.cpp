#include "messages/single_copy.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace procgroup {
namespace {

// Read in one turn, so that deadlines and Ctrl-C are received in time. Where several messages are there, both threads
// of a rank want to go on with theirs, and each turn holds up the other (64 messages of 1 MiB each way: 231 us a
// message in turns of 1 MiB, 142 of 256 KiB, 117 of 128 KiB, 127 of 64 KiB).
constexpr size_t kTurnBytes = size_t{1} << 20;
constexpr size_t kSharedTurnBytes = size_t{128} << 10;

}  // namespace

std::optional<RemotePlace> ExposureTable::find(uint64_t number) const {
  const Entry& found = entry(number);
  if (number == 0 || found.number.load(std::memory_order_acquire) != number) return std::nullopt;
  return found.place.load(std::memory_order_relaxed);
}

bool ExposureTable::exposes(uint64_t number) const {
#if !defined(__SANITIZE_THREAD__)                       // which does not know fences
  std::atomic_thread_fence(std::memory_order_acquire);  // the reads come before this look
#endif
  return entry(number).number.load(std::memory_order_seq_cst) == number;
}

Exposure::Exposure(ExposureTable& table, uint64_t number, RemotePlace place) {
  ExposureTable::Entry& entry = table.entries_[number % ExposureTable::kEntries];
  if (entry.number.load(std::memory_order_relaxed) != 0) return;
  entry.place.store(place, std::memory_order_relaxed);
  entry.number.store(number, std::memory_order_release);
  entry_ = &entry;
}

void Exposure::end() {
  if (entry_ == nullptr) return;
  entry_->number.store(0, std::memory_order_seq_cst);
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before the sender's user writes into the array
#endif
  entry_ = nullptr;
}

Exposure SingleCopy::expose(uint64_t number, const void* data, size_t bytes, bool is_behind_others) const {
  if (bytes < (is_behind_others ? from_behind_others : from)) return {};
  return {*mine, number, RemotePlace::of(data, bytes, *own)};
}

bool SingleCopyReads::contains(uint64_t number) const {
  return std::ranges::any_of(reads_, [number](const Read& read) { return read.number == number; });
}

bool SingleCopyReads::begin(const SingleCopy& single_copy, uint64_t number, std::shared_ptr<ReceiveTransfer> receive,
                            uint64_t total) {
  const std::optional<RemotePlace> place = single_copy.theirs->find(number);
  if (!place) return false;
  reads_.push_back({number, std::move(receive), total, *place});
  return true;
}

SingleCopyReads::Outcome SingleCopyReads::advance(const SingleCopy& single_copy, Read& ended) {
  Read& read = reads_.front();
  const size_t turn = reads_.size() == 1 ? kTurnBytes : kSharedTurnBytes;
  const size_t bytes = std::min(turn, static_cast<size_t>(read.total) - read.done);
  const bool valid = single_copy.peer->read_exposed(read.receive->data + read.done, read.place, read.done, bytes) &&
                     single_copy.theirs->exposes(read.number);
  if (valid) {
    read.done += bytes;
    read.receive->add_moved(bytes);
  }
  if (valid && read.done < read.total) {
    std::rotate(reads_.begin(), std::next(reads_.begin()), reads_.end());
    return Outcome::kBlock;
  }
  ended = std::move(read);
  reads_.pop_front();
  return valid ? Outcome::kCompleted : Outcome::kUnreadable;
}

std::shared_ptr<ReceiveTransfer> SingleCopyReads::remove(uint64_t number) {
  const auto found = std::ranges::find(reads_, number, &Read::number);
  if (found == reads_.end()) return nullptr;
  std::shared_ptr<ReceiveTransfer> receive = std::move(found->receive);
  reads_.erase(found);
  return receive;
}

uint64_t SingleCopyReads::remove(const ReceiveTransfer& receive) {
  const auto found = std::ranges::find_if(reads_, [&](const Read& read) { return read.receive.get() == &receive; });
  if (found == reads_.end()) return 0;
  const uint64_t number = found->number;
  reads_.erase(found);
  return number;
}

void SingleCopyReads::fail_all(const Failure& failure) {
  for (const Read& read : reads_) fail_unless_completed(*read.receive, failure);
  reads_.clear();
}

}  // namespace procgroup
