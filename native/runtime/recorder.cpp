#include "runtime/recorder.hpp"

#include <algorithm>
#include <mutex>
#include <new>
#include <optional>

#include "base/diagnostics.hpp"

namespace procgroup {

namespace {

using Field = std::atomic<uint64_t>;

struct Header {
  uint64_t loaded_ticks;  // written before any peer can see the memory
  int64_t loaded_ns;
  Field added;           // how many calls
  uint64_t reserved[5];  // the entries begin at a cache line
};

// Every field is stored with release after the odd version, and loaded with acquire before the version is
// read again: a reader that sees any new field also sees that the version has changed.
struct Entry {
  Field
      version;  // 16 * index + 2 when added, 2 more after each of at most three changes; odd meanwhile; 0: not written
  Field group;
  Field sequence;
  Field count;
  Field started;  // of a call that has only been issued: when that was
  Field ended;
  Field kind;    // op: 6 bits, on_device and external: 1 bit each; dtype, reduce op, state: 8 bits each; root: 32 bits
  Field origin;  // number of the source line: 16 bits; from the issue to the start in units of kDelayTicks: 48 bits
};
static_assert(sizeof(Entry) == 64 && sizeof(Header) == 64 && Field::is_always_lock_free);

constexpr uint64_t kDelayTicks = 256;
constexpr int kSourceBits = 16;

Entry* entries(void* memory) { return reinterpret_cast<Entry*>(static_cast<std::byte*>(memory) + sizeof(Header)); }
const Entry* entries(const void* memory) { return entries(const_cast<void*>(memory)); }

uint64_t pack(const Descriptor& call, CallState state) {
  return uint64_t{static_cast<uint8_t>(call.op)} | uint64_t{call.on_device} << 6 | uint64_t{call.external} << 7 |
         uint64_t{static_cast<uint8_t>(call.dtype)} << 8 | uint64_t{call.of_integers} << 15 |
         uint64_t{static_cast<uint8_t>(call.reduce_op)} << 16 | uint64_t{static_cast<uint8_t>(state)} << 24 |
         uint64_t{static_cast<uint32_t>(call.root)} << 32;
}

uint64_t with_state(uint64_t kind, CallState state) {
  return (kind & ~(uint64_t{0xff} << 24)) | uint64_t{static_cast<uint8_t>(state)} << 24;
}

std::optional<Record> unpack(uint64_t index, uint64_t kind) {
  const auto byte = [kind](int position) { return static_cast<uint8_t>(kind >> (8 * position)); };
  const uint8_t op = byte(0) & 0x3f;
  const uint8_t dtype = byte(1) & 0x7f;
  if (op > static_cast<uint8_t>(kMakesGroup) || dtype >= kDtypes || byte(2) >= kReduceOps ||
      byte(3) > static_cast<uint8_t>(CallState::kQueued))
    return std::nullopt;
  Record record{};
  record.index = index;
  record.call.op = static_cast<OpKind>(op);
  record.call.on_device = (byte(0) >> 6 & 1) != 0;
  record.call.external = byte(0) >> 7 != 0;
  record.call.dtype = static_cast<Dtype>(dtype);
  record.call.of_integers = byte(1) >> 7 != 0;
  record.call.reduce_op = static_cast<ReduceOp>(byte(2));
  record.call.root = static_cast<int32_t>(kind >> 32);
  record.state = static_cast<CallState>(byte(3));
  return record;
}

// One attempt to read an entry; nothing when it is empty or is written meanwhile. Times are still ticks.
std::optional<Record> read_once(const Entry& entry) {
  const uint64_t version = entry.version.load(std::memory_order_acquire);
  if (version == 0 || version % 2 != 0) return std::nullopt;
  std::optional<Record> record = unpack(version / 16, entry.kind.load(std::memory_order_acquire));
  if (!record) return std::nullopt;
  record->call.group = entry.group.load(std::memory_order_acquire);
  record->call.sequence = entry.sequence.load(std::memory_order_acquire);
  record->call.count = entry.count.load(std::memory_order_acquire);
  record->started_ns = static_cast<int64_t>(entry.started.load(std::memory_order_acquire));
  record->ended_ns = static_cast<int64_t>(entry.ended.load(std::memory_order_acquire));
  const uint64_t origin = entry.origin.load(std::memory_order_acquire);
  record->source = static_cast<uint32_t>(origin & ((1 << kSourceBits) - 1));
  record->issued_ns = record->started_ns - static_cast<int64_t>((origin >> kSourceBits) * kDelayTicks);
  if (record->state == CallState::kIssued) record->started_ns = 0;
  if (entry.version.load(std::memory_order_relaxed) != version) return std::nullopt;
  return record;
}

std::optional<Record> read_entry(const Entry& entry) {
  // A writer is done within nanoseconds, unless it was stopped or died there: that entry is left out.
  constexpr int kAttempts = 16;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (auto record = read_once(entry)) return record;
    if (entry.version.load(std::memory_order_relaxed) == 0) return std::nullopt;
  }
  return std::nullopt;
}

// Opens an entry for writing, and gives it a version that it never had at the end of the scope.
class Change {
 public:
  Change(Entry& entry, uint64_t version) : entry_(entry), version_(version) {
    entry_.version.store(version_ - 1, std::memory_order_relaxed);
  }
  explicit Change(Entry& entry) : Change(entry, entry.version.load(std::memory_order_relaxed) + 2) {}
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;
  ~Change() { entry_.version.store(version_, std::memory_order_release); }

  static void set(Field& field, uint64_t value) { field.store(value, std::memory_order_release); }

 private:
  Entry& entry_;
  const uint64_t version_;
};

CallState state_of(const Entry& entry) {
  return static_cast<CallState>(entry.kind.load(std::memory_order_relaxed) >> 24 & 0xff);
}

// Whether the entry still is this call's.
bool is_of(const Entry& entry, uint64_t index) { return entry.version.load(std::memory_order_relaxed) / 16 == index; }

// Whether that is so, and the call has not ended. So an entry changes at most three times after it was added, and its
// versions stay below the next index's.
bool is_running(const Entry& entry, uint64_t index) {
  return is_of(entry, index) && state_of(entry) != CallState::kCompleted && state_of(entry) != CallState::kFailed;
}

}  // namespace

const char* call_state_name(CallState state) {
  constexpr const char* kNames[] = {"started", "completed", "failed", "issued", "queued"};
  return kNames[static_cast<int>(state)];
}

size_t Recorder::bytes() { return sizeof(Header) + kEntries * sizeof(Entry); }

Recorder::Recorder(void* memory) : memory_(memory) {
  const ClockPair loaded = ClockPair::at_load();
  new (memory) Header{loaded.ticks, loaded.ns, 0, {}};
  for (size_t i = 0; i < kEntries; ++i) new (&entries(memory)[i]) Entry{};
}

uint64_t Recorder::begin(const Descriptor& call, uint32_t source) {
  if constexpr (!kDiagnoses) return 0;
  return add(call, CallState::kStarted, source, now_ticks(), 0);
}

uint64_t Recorder::issue(const Descriptor& call, uint32_t source) {
  if constexpr (!kDiagnoses) return 0;
  return add(call, CallState::kIssued, source, now_ticks(), 0);
}

void Recorder::record(const Descriptor& call, uint64_t started, uint32_t source) {
  if constexpr (!kDiagnoses) return;
  add(call, CallState::kCompleted, source, started, now_ticks());
}

uint64_t Recorder::add(const Descriptor& call, CallState state, uint32_t source, uint64_t started, uint64_t ended) {
  const std::lock_guard writing(writing_);
  const uint64_t index = next_++;
  static_cast<Header*>(memory_)->added.store(next_, std::memory_order_relaxed);
  Entry& entry = entries(memory_)[index % kEntries];
  const Change change(entry, 16 * index + 2);
  Change::set(entry.group, call.group);
  Change::set(entry.sequence, call.sequence);
  Change::set(entry.count, call.count);
  Change::set(entry.started, started);
  Change::set(entry.ended, ended);
  Change::set(entry.kind, pack(call, state));
  Change::set(entry.origin, source);
  return index;
}

uint64_t Recorder::start(uint64_t index, const Descriptor& call, uint32_t source) {
  if constexpr (!kDiagnoses) return 0;
  const uint64_t now = now_ticks();
  {
    const std::lock_guard writing(writing_);
    Entry& entry = entries(memory_)[index % kEntries];
    if (is_of(entry, index)) {
      const uint64_t waited = now - entry.started.load(std::memory_order_relaxed);
      const Change change(entry);
      Change::set(entry.group, call.group);
      Change::set(entry.sequence, call.sequence);
      Change::set(entry.count, call.count);
      Change::set(entry.started, now);
      Change::set(entry.kind, pack(call, CallState::kStarted));
      Change::set(entry.origin, source | waited / kDelayTicks << kSourceBits);
      return index;
    }
  }
  return add(call, CallState::kStarted, source, now, 0);
}

void Recorder::queue(uint64_t index) {
  if constexpr (!kDiagnoses) return;
  const std::lock_guard writing(writing_);
  Entry& entry = entries(memory_)[index % kEntries];
  if (!is_running(entry, index)) return;
  const Change change(entry);
  Change::set(entry.kind, with_state(entry.kind.load(std::memory_order_relaxed), CallState::kQueued));
}

void Recorder::complete(uint64_t index) { end(index, CallState::kCompleted); }

void Recorder::fail(uint64_t index) { end(index, CallState::kFailed); }

void Recorder::end(uint64_t index, CallState state) {
  if constexpr (!kDiagnoses) return;
  const uint64_t now = now_ticks();
  const std::lock_guard writing(writing_);
  Entry& entry = entries(memory_)[index % kEntries];
  if (!is_running(entry, index)) return;
  __builtin_prefetch(&entries(memory_)[next_ % kEntries], 1);  // of the next call
  const Change change(entry);
  Change::set(entry.ended, now);
  Change::set(entry.kind, with_state(entry.kind.load(std::memory_order_relaxed), state));
}

std::vector<Record> Recorder::read(const void* memory, const ClockPair& later) {
  const auto& header = *static_cast<const Header*>(memory);
  const ClockPair loaded{header.loaded_ticks, header.loaded_ns};
  std::vector<Record> records;
  for (size_t i = 0; i < kEntries; ++i) {
    if (auto record = read_entry(entries(memory)[i])) records.push_back(*record);
  }
  const auto to_ns = [&](int64_t ticks) {
    return ticks == 0 ? 0 : ticks_to_ns(static_cast<uint64_t>(ticks), loaded, later);
  };
  for (Record& record : records) {
    record.issued_ns = to_ns(record.issued_ns);
    record.started_ns = to_ns(record.started_ns);
    record.ended_ns = to_ns(record.ended_ns);
  }
  std::sort(records.begin(), records.end(), [](const Record& a, const Record& b) { return a.index < b.index; });
  return records;
}

uint64_t Recorder::recorded(const void* memory) {
  return static_cast<const Header*>(memory)->added.load(std::memory_order_relaxed);
}

}  // namespace procgroup
