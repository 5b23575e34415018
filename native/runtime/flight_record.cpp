#include "runtime/flight_record.hpp"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <mutex>
#include <new>
#include <span>
#include <stdexcept>
#include <system_error>

#include "base/futex.hpp"
#include "base/ticks.hpp"
#include "runtime/failure.hpp"

namespace procgroup {
namespace {

constexpr char kMagic[8] = {'p', 'g', 'f', 'l', 'i', 'g', 'h', 't'};
constexpr uint32_t kVersion = 6;
constexpr const char* kOriginNames[] = {"own", "call", "peer"};
constexpr size_t kGroups = 128;
constexpr size_t kRuns = 16;
constexpr int kMostMembers = 1 << 20;
constexpr size_t kLineBytes = 128;
constexpr size_t kFunctionBytes = 32;
constexpr size_t kAwaited = 16;
constexpr size_t kReplayed = 16;

using Word = std::atomic<uint64_t>;

// The ranks first, first + step, ...: those of a group of a mesh are one run.
struct RankRun {
  int32_t first;
  int32_t step;
  int32_t count;
};

struct GroupEntry {
  Word identity;  // stored last; 0 while the entry is written
  int32_t rank;
  int32_t size;
  char name[48];
  uint32_t runs;  // more than kRuns: there was no room for the members
  RankRun members[kRuns];
};

struct Line {
  char text[kLineBytes];
  char function[kFunctionBytes];
};

// One entry for all groups with the same identity modulo kAwaited; the last write counts.
struct AwaitedEntry {
  Word version;  // odd while the entry is written
  Word group;
  Word sequence;
  std::atomic<uint32_t> count;
  std::atomic<int32_t> ranks[AwaitedRanks::kMostAwaited];
};

// One entry for all groups with the same identity modulo kAwaited.
struct MovesEntry {
  Word group;
  Word count;
};

// One entry for each group of which replays are known: more than kReplayed have none.
struct ReplaysEntry {
  Word version;  // odd while the entry is written
  Word group;    // 0: free
  Word count;
  Word are_all;
  Word calls[RunningReplays::kMost];
};

void copy_text(char* to, size_t room, std::string_view text) {
  const size_t bytes = std::min(text.size(), room - 1);
  std::copy_n(text.begin(), bytes, to);
  std::memset(to + bytes, 0, room - bytes);
}

template <size_t kRoom>
void copy_text(char (&to)[kRoom], std::string_view text) {
  copy_text(to, kRoom, text);
}

template <size_t kRoom>
std::string text_of(const char (&from)[kRoom]) {
  return readable(from, kRoom);
}

std::vector<RankRun> runs_of(const std::vector<int>& ranks) {
  std::vector<RankRun> runs;
  for (size_t begin = 0, end = 0; begin < ranks.size(); begin = end) {
    const int step = begin + 1 < ranks.size() ? ranks[begin + 1] - ranks[begin] : 1;
    for (end = begin + 1; end < ranks.size() && ranks[end] - ranks[end - 1] == step;) ++end;
    runs.push_back({ranks[begin], step, static_cast<int32_t>(end - begin)});
  }
  return runs;
}

std::vector<int> members_of(const GroupEntry& entry) {
  const uint32_t runs = entry.runs;
  const int size = entry.size;
  if (runs > kRuns || size < 0 || size > kMostMembers) return {};
  std::vector<int> members;
  for (const RankRun& run : std::span(entry.members).first(runs)) {
    const RankRun read = run;  // once: its writer may change it
    for (int64_t at = 0; at < read.count; ++at) {
      const int64_t rank = read.first + at * read.step;
      if (rank < 0 || rank > INT32_MAX || std::ssize(members) == size) return {};
      members.push_back(static_cast<int>(rank));
    }
  }
  return std::ssize(members) == size ? members : std::vector<int>{};
}

std::string first_line(const char* path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "";
}

uint64_t own_pid_namespace() {
  struct stat found;
  return stat("/proc/self/ns/pid", &found) == 0 ? found.st_ino : 0;
}

[[noreturn]] void refuse(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

struct FlightRecordLayout {
  char magic[8];
  uint32_t version;
  int32_t rank;
  uint64_t bytes;
  int32_t world_size;
  std::atomic<int32_t> failed_peer;
  int64_t pid;
  uint64_t pid_namespace;
  int64_t created_wall_ns;
  int64_t created_ns;
  // A seqlock: odd while the beat is written.
  Word beat_version;
  Word beat_ticks;
  Word beat_ns;
  std::atomic<uint32_t> state;
  std::atomic<uint32_t> source_lines;
  std::atomic<uint32_t> stack_requests;
  std::atomic<uint32_t> origin;
  Word groups;  // that were ever added: entry number n is at n % kGroups
  char host[64];
  char boot[40];
  char job[64];
  char program[512];
  SharedText<512> reason;
  SharedText<256> report;
  SharedText<8192> stack;
  GroupEntry group_entries[kGroups];
  AwaitedEntry awaited[kAwaited];
  MovesEntry moves[kAwaited];
  ReplaysEntry replays[kReplayed];
  Line lines[FlightRecord::kSourceLines];
  alignas(64) std::byte recorder[1];  // Recorder::bytes() of them
};

namespace {

// Reserved before it is touched: a full file system refuses it here, and not by SIGBUS.
bool reserve(const FileDescriptor& file, size_t bytes) {
  return file && posix_fallocate(file.get(), 0, static_cast<off_t>(bytes)) == 0;
}

// Who asks whether the record is in use holds the lock for a moment.
void lock(const FileDescriptor& file) {
  constexpr int kAttempts = 50;
  for (int attempt = 0; attempt < kAttempts && flock(file.get(), LOCK_SH | LOCK_NB) != 0; ++attempt) usleep(1000);
}

FileDescriptor make_file(const std::string& path, size_t bytes) {
  if (!path.empty()) {
    FileDescriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (reserve(file, bytes)) {
      lock(file);
      return file;
    }
    if (file) unlink(path.c_str());
  }
  FileDescriptor memory(memfd_create("procgroup-record", MFD_CLOEXEC));
  return reserve(memory, bytes) ? std::move(memory) : FileDescriptor();
}

size_t record_bytes() { return offsetof(FlightRecordLayout, recorder) + Recorder::bytes(); }

ClockPair beat_of(const FlightRecordLayout& layout) {
  constexpr int kAttempts = 16;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const uint64_t version = layout.beat_version.load(std::memory_order_acquire);
    const ClockPair beat{layout.beat_ticks.load(std::memory_order_acquire),
                         static_cast<int64_t>(layout.beat_ns.load(std::memory_order_acquire))};
    if (version % 2 == 0 && layout.beat_version.load(std::memory_order_relaxed) == version) return beat;
  }
  return {0, layout.created_ns};  // its writer died while it wrote the beat
}

}  // namespace

const char* rank_state_name(RankState state) {
  constexpr const char* kNames[] = {"running", "left", "failed"};
  return kNames[static_cast<int>(state)];
}

const char* failure_origin_name(FailureOrigin origin) { return kOriginNames[static_cast<size_t>(origin)]; }

FailureOrigin failure_origin(std::string_view name) {
  const auto* found = std::ranges::find(kOriginNames, name, [](const char* one) { return std::string_view(one); });
  if (found == std::end(kOriginNames)) throw std::invalid_argument("no such origin of a failure: " + std::string(name));
  return static_cast<FailureOrigin>(found - std::begin(kOriginNames));
}

FlightRecordView::FlightRecordView(const std::byte* memory, size_t bytes)
    : layout_(*reinterpret_cast<const FlightRecordLayout*>(memory)) {
  if (bytes < sizeof kMagic + sizeof kVersion || std::memcmp(layout_.magic, kMagic, sizeof kMagic) != 0)
    throw std::runtime_error("this is not a flight record of procgroup");
  if (layout_.version != kVersion || bytes < record_bytes())
    throw std::runtime_error("this flight record was written by another version of procgroup");
}

RecordedRank FlightRecordView::rank() const {
  return {layout_.rank, layout_.world_size, text_of(layout_.job), text_of(layout_.program)};
}
int64_t FlightRecordView::pid() const { return layout_.pid; }
uint64_t FlightRecordView::pid_namespace() const { return layout_.pid_namespace; }
std::string FlightRecordView::host() const { return text_of(layout_.host); }
std::string FlightRecordView::boot() const { return text_of(layout_.boot); }
int64_t FlightRecordView::created_wall_ns() const { return layout_.created_wall_ns; }
int64_t FlightRecordView::created_ns() const { return layout_.created_ns; }
int64_t FlightRecordView::beat_ns() const { return beat_of(layout_).ns; }

RankState FlightRecordView::state() const {
  const uint32_t state = layout_.state.load(std::memory_order_acquire);
  return state <= static_cast<uint32_t>(RankState::kFailed) ? static_cast<RankState>(state) : RankState::kFailed;
}

RecordedFailure FlightRecordView::failure() const {
  RecordedFailure failure{.peer = layout_.failed_peer.load(std::memory_order_relaxed)};
  const uint32_t origin = layout_.origin.load(std::memory_order_relaxed);
  if (origin < std::size(kOriginNames)) failure.origin = static_cast<FailureOrigin>(origin);
  if (const auto reason = layout_.reason.read()) failure.reason = readable(reason->text.data(), reason->text.size());
  return failure;
}

std::vector<Record> FlightRecordView::calls() const { return Recorder::read(layout_.recorder, beat_of(layout_)); }

uint64_t FlightRecordView::recorded() const { return Recorder::recorded(layout_.recorder); }

bool FlightRecordView::has_source_line(uint32_t number) const {
  const uint32_t known = layout_.source_lines.load(std::memory_order_acquire);
  return number != 0 && number <= std::min<uint32_t>(known, FlightRecord::kSourceLines);
}

std::string FlightRecordView::source_line(uint32_t number) const {
  return has_source_line(number) ? text_of(layout_.lines[number - 1].text) : "";
}

std::string FlightRecordView::function(uint32_t number) const {
  return has_source_line(number) ? text_of(layout_.lines[number - 1].function) : "";
}

std::string FlightRecordView::call_site(uint32_t number) const {
  const std::string name = function(number);
  return name.empty() ? source_line(number) : source_line(number) + " (" + name + ")";
}

uint64_t FlightRecordView::moves(uint64_t group) const {
  const MovesEntry& entry = layout_.moves[group % kAwaited];
  return entry.group.load(std::memory_order_acquire) == group ? entry.count.load(std::memory_order_relaxed) : 0;
}

std::vector<RecordedGroup> FlightRecordView::groups() const {
  std::vector<RecordedGroup> groups;
  for (const GroupEntry& entry : layout_.group_entries) {
    const uint64_t identity = entry.identity.load(std::memory_order_acquire);
    if (identity == 0) continue;
    RecordedGroup group{identity, entry.rank, entry.size, text_of(entry.name), members_of(entry)};
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.identity.load(std::memory_order_relaxed) == identity) groups.push_back(std::move(group));
  }
  return groups;
}

AwaitedRanks FlightRecordView::awaited(const Descriptor& call) const {
  const AwaitedEntry& entry = layout_.awaited[call.group % kAwaited];
  const uint64_t version = entry.version.load(std::memory_order_acquire);
  const bool is_of_call = entry.group.load(std::memory_order_acquire) == call.group &&
                          entry.sequence.load(std::memory_order_acquire) == call.sequence;
  if (version % 2 != 0 || is_message(call.op) || !is_of_call) return {};
  AwaitedRanks awaited{.count = entry.count.load(std::memory_order_acquire)};
  for (size_t at = 0; at < awaited.count && awaited.count <= AwaitedRanks::kMostAwaited; ++at)
    awaited.ranks.push_back(entry.ranks[at].load(std::memory_order_acquire));
  return entry.version.load(std::memory_order_acquire) == version ? awaited : AwaitedRanks{};
}

RunningReplays FlightRecordView::replays(uint64_t group) const {
  for (const ReplaysEntry& entry : layout_.replays) {
    const uint64_t version = entry.version.load(std::memory_order_acquire);
    if (version % 2 != 0 || entry.group.load(std::memory_order_acquire) != group) continue;
    RunningReplays replays{.are_all = entry.are_all.load(std::memory_order_acquire) != 0};
    const uint64_t count = std::min<uint64_t>(entry.count.load(std::memory_order_acquire), RunningReplays::kMost);
    for (size_t at = 0; at < count; ++at) replays.calls.push_back(entry.calls[at].load(std::memory_order_acquire));
    if (entry.version.load(std::memory_order_acquire) == version) return replays;
  }
  return {};
}

std::optional<SharedText<8192>::Value> FlightRecordView::stack() const { return layout_.stack.read(); }
std::optional<SharedText<256>::Value> FlightRecordView::report() const { return layout_.report.read(); }

std::string describe_stopped(const FlightRecordView& record) {
  if (record.pid_namespace() != own_pid_namespace()) return "";
  const std::string line = first_line(("/proc/" + std::to_string(record.pid()) + "/stat").c_str());
  // The name in parentheses may hold anything, also parentheses.
  const size_t name = line.rfind(") ");
  const char state = name == std::string::npos ? '\0' : line[name + 2];
  if (state == 'T') return "stopped (SIGSTOP)";
  return state == 't' ? "stopped by a debugger" : "";
}

std::unique_ptr<FlightRecord> FlightRecord::create(const std::string& path, const RecordedRank& rank) {
  std::unique_ptr<FlightRecord> record(new FlightRecord(make_file(path, record_bytes())));
  auto* layout = new (record->memory_) FlightRecordLayout{};
  layout->rank = rank.rank;
  layout->world_size = rank.world_size;
  layout->bytes = record_bytes();
  layout->pid = getpid();
  layout->pid_namespace = own_pid_namespace();
  layout->created_wall_ns = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  layout->created_ns = now_ns();
  copy_text(layout->host, host_name());
  copy_text(layout->boot, first_line("/proc/sys/kernel/random/boot_id"));
  copy_text(layout->job, rank.job);
  copy_text(layout->program, rank.program);
  record->recorder_ = std::make_unique<Recorder>(layout->recorder);
  record->beat();
  layout->version = kVersion;
  std::memcpy(layout->magic, kMagic, sizeof kMagic);  // last: what has it is whole
  return record;
}

std::unique_ptr<FlightRecord> FlightRecord::attach(FileDescriptor descriptor) {
  std::unique_ptr<FlightRecord> record(new FlightRecord(std::move(descriptor)));
  static_cast<void>(record->view());
  record->descriptor_.reset();
  return record;
}

FlightRecord::FlightRecord(FileDescriptor descriptor) : descriptor_(std::move(descriptor)), bytes_(record_bytes()) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (descriptor_) {
    struct stat found;
    if (fstat(descriptor_.get(), &found) != 0) refuse("reading the flight record");
    if (static_cast<size_t>(found.st_size) < bytes_)
      throw std::runtime_error("this flight record is cut short, or was written by another version of procgroup");
    is_writable_ = (fcntl(descriptor_.get(), F_GETFL) & O_ACCMODE) == O_RDWR;
    flags = MAP_SHARED;
  }
  const int access = PROT_READ | (is_writable_ ? PROT_WRITE : 0);
  void* memory = mmap(nullptr, bytes_, access, flags, descriptor_ ? descriptor_.get() : -1, 0);
  if (memory == MAP_FAILED) refuse("mapping the flight record");
  madvise(memory, bytes_, MADV_DONTFORK);
  memory_ = static_cast<std::byte*>(memory);
}

FlightRecord::~FlightRecord() { munmap(memory_, bytes_); }

void FlightRecord::add_group(const RecordedGroup& group) {
  const std::lock_guard writing(writing_);
  FlightRecordLayout& record = layout();
  const uint64_t number = record.groups.load(std::memory_order_relaxed);
  GroupEntry& entry = record.group_entries[number % kGroups];
  entry.identity.store(0, std::memory_order_release);
  entry.rank = group.rank;
  entry.size = group.size;
  copy_text(entry.name, group.name);
  const std::vector<RankRun> runs = runs_of(group.members);
  entry.runs = static_cast<uint32_t>(runs.size());
  std::copy_n(runs.begin(), std::min(runs.size(), kRuns), entry.members);
  entry.identity.store(group.identity, std::memory_order_release);
  record.groups.store(number + 1, std::memory_order_release);
}

uint32_t FlightRecord::add_source_line(std::string_view line, std::string_view function) {
  const std::lock_guard writing(writing_);
  FlightRecordLayout& record = layout();
  const uint32_t number = record.source_lines.load(std::memory_order_relaxed);
  if (number == kSourceLines) return 0;
  // The end of a long path says more than its beginning.
  copy_text(record.lines[number].text, line.substr(line.size() - std::min(line.size(), kLineBytes - 1)));
  copy_text(record.lines[number].function, function);
  record.source_lines.store(number + 1, std::memory_order_release);
  return number + 1;
}

void FlightRecord::note_move(uint64_t group) {
  MovesEntry& entry = layout().moves[group % kAwaited];
  entry.count.fetch_add(1, std::memory_order_relaxed);
  entry.group.store(group, std::memory_order_release);
}

void FlightRecord::set_awaited(const Descriptor& call, const std::vector<int>& global_ranks) {
  const std::lock_guard writing(writing_);
  AwaitedEntry& entry = layout().awaited[call.group % kAwaited];
  const uint64_t version = entry.version.load(std::memory_order_relaxed);
  entry.version.store(version + 1, std::memory_order_release);
  entry.group.store(call.group, std::memory_order_release);
  entry.sequence.store(call.sequence, std::memory_order_release);
  entry.count.store(static_cast<uint32_t>(global_ranks.size()), std::memory_order_release);
  for (size_t at = 0; at < std::min(global_ranks.size(), AwaitedRanks::kMostAwaited); ++at)
    entry.ranks[at].store(global_ranks[at], std::memory_order_release);
  entry.version.store(version + 2, std::memory_order_release);
}

void FlightRecord::set_replays(uint64_t group, const RunningReplays& replays) {
  const std::lock_guard writing(writing_);
  std::span<ReplaysEntry> entries(layout().replays);
  const auto is_of = [](uint64_t which) {
    return [which](const ReplaysEntry& entry) { return entry.group.load(std::memory_order_relaxed) == which; };
  };
  auto entry = std::ranges::find_if(entries, is_of(group));
  if (entry == entries.end()) entry = std::ranges::find_if(entries, is_of(0));
  if (entry == entries.end()) return;
  const size_t count = std::min(replays.calls.size(), RunningReplays::kMost);
  const uint64_t version = entry->version.load(std::memory_order_relaxed);
  entry->version.store(version + 1, std::memory_order_release);
  entry->group.store(replays == RunningReplays{} ? 0 : group, std::memory_order_release);
  entry->count.store(count, std::memory_order_release);
  entry->are_all.store(replays.are_all && count == replays.calls.size(), std::memory_order_release);
  for (size_t at = 0; at < count; ++at) entry->calls[at].store(replays.calls[at], std::memory_order_release);
  entry->version.store(version + 2, std::memory_order_release);
}

void FlightRecord::beat() {
  const std::lock_guard writing(writing_);
  FlightRecordLayout& record = layout();
  const ClockPair now = ClockPair::now();
  const uint64_t version = record.beat_version.load(std::memory_order_relaxed);
  record.beat_version.store(version + 1, std::memory_order_relaxed);
  record.beat_ticks.store(now.ticks, std::memory_order_release);
  record.beat_ns.store(static_cast<uint64_t>(now.ns), std::memory_order_release);
  record.beat_version.store(version + 2, std::memory_order_release);
}

std::atomic<uint32_t>& FlightRecord::stack_requests() { return layout().stack_requests; }

void FlightRecord::request_stack() {
  if (!is_writable_) return;
  stack_requests().fetch_add(1, std::memory_order_release);
  futex_wake_all(stack_requests());
}

void FlightRecord::set_stack(std::string_view text) {
  const std::lock_guard writing(writing_);
  layout().stack.write(text, now_ns());
}

void FlightRecord::set_report(std::string_view text) {
  const std::lock_guard writing(writing_);
  layout().report.write(text, now_ns());
}

void FlightRecord::end(RankState state, const RecordedFailure& failure) {
  beat();
  const std::lock_guard writing(writing_);
  if (layout().state.load(std::memory_order_relaxed) != static_cast<uint32_t>(RankState::kRunning)) return;
  if (!failure.reason.empty()) layout().reason.write(failure.reason, now_ns());
  layout().failed_peer.store(failure.peer, std::memory_order_relaxed);
  layout().origin.store(static_cast<uint32_t>(failure.origin), std::memory_order_relaxed);
  layout().state.store(static_cast<uint32_t>(state), std::memory_order_release);
}

}  // namespace procgroup
