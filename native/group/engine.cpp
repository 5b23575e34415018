#include "group/engine.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <random>
#include <system_error>

#include "base/clock.hpp"
#include "base/diagnostics.hpp"
#include "base/futex.hpp"
#include "base/log.hpp"
#include "group/engine_registry.hpp"
#include "messages/single_copy.hpp"
#include "runtime/call_report.hpp"
#include "runtime/failure_record.hpp"
#include "transport/channel.hpp"

namespace procgroup {
namespace {

// One ring per ordered pair; together at most about 1 MiB per rank, and at least 16 KiB each.
size_t ring_capacity(int world_size) {
  const size_t share = (size_t{1} << 20) / static_cast<size_t>(world_size);
  return std::bit_floor(std::clamp(share, size_t{16} << 10, size_t{256} << 10));
}

// How long a rank that leaves tries to send its last messages, such as the reason of a failed call.
constexpr double kLastWordsSeconds = 0.2;

// After so many rounds of receiving, further messages are new ones rather than those that had already arrived.
constexpr int kTurnsToQuiet = 16;

// The offset of the exposure table for `peer` in a rank's arena.
uint64_t exposure_table(const ArenaHeader& header, int peer) {
  return header.exposure_tables + sizeof(ExposureTable) * static_cast<size_t>(peer);
}

size_t ring_stride(size_t capacity) { return round_up(Ring::bytes(capacity), kArenaLine); }

}  // namespace

Engine::Engine(const EngineOptions& options, bool shared)
    : options_(options),
      messages_(options.rank, options.world_size),
      handshakes_(messages_, options.rank, options.world_size),
      waits_(messages_, options.rank, options.world_size) {
  policy_.hold_lock = !options.ranks_are_threads;
  for (int peer = 0; peer < options.world_size; ++peer) peers_.push_back(std::make_unique<Peer>());
  if (shared) {
    try {
      make_arena(Arena::create(rank()));
      make_life();
    } catch (const std::system_error& error) {
      arena_problem_ = error.what();
      watcher_.reset();
      life_lock_.reset();  // its word is in the arena
      heap_.reset();
      arena_.reset();
    }
  }
  if (!arena_) make_arena(Arena::create_private(rank()));
  messages_.read_ends_with([this](int peer) { return exit_in_memory(peer); });
  progress_ = std::make_unique<ProgressThread>(*this, policy_);
  record_ = FlightRecord::create(options_.record_path, options_.recorded);
  if constexpr (kDiagnoses) observer_ = std::make_unique<Observer>(*record_, [this] { answer_while_idle(); });
  register_engine(this);
}

Engine::~Engine() {
  if (forked()) {
    // The threads behind these do not exist here: they can be neither joined nor destroyed.
    static_cast<void>(progress_.release());
    static_cast<void>(life_lock_.release());
    static_cast<void>(watcher_.release());
    static_cast<void>(observer_.release());
    return;
  }
  shutdown();
  unregister_engine(this);
}

void Engine::make_arena(Arena arena) {
  arena_ = std::make_shared<Arena>(std::move(arena));
  heap_ = std::make_unique<GroupHeap>(*arena_);
  ArenaHeader& header = arena_->header();
  std::random_device random;
  nonce_ = std::make_unique<const uint64_t>(uint64_t{random()} << 32 | random());
  header.nonce = *nonce_;
  header.nonce_address = reinterpret_cast<uintptr_t>(nonce_.get());
  header.ring_capacity = ring_capacity(world_size());
  header.rings = arena_->allocate(ring_stride(header.ring_capacity) * static_cast<size_t>(world_size()));
  for (int peer = 0; peer < world_size(); ++peer)
    Ring::initialise(arena_->at(header.rings, 0) + ring_stride(header.ring_capacity) * index(peer));
  exit_record_ = heap_->take(largest_record(world_size()));  // now: memory may be refused later
  header.wait_edge_board = arena_->allocate(sizeof(WaitEdgeBoard));
  header.exposure_tables = arena_->allocate(sizeof(ExposureTable) * static_cast<size_t>(world_size()));
  for (int peer = 0; peer < world_size(); ++peer)
    new (arena_->at(exposure_table(header, peer), sizeof(ExposureTable))) ExposureTable;
  board_ = new (arena_->at(header.wait_edge_board, sizeof(WaitEdgeBoard))) WaitEdgeBoard;
}

void Engine::make_life() {
  if constexpr (!kDiagnoses) return;
  life_lock_ = std::make_unique<LifeLock>(arena_->header().life);
  watcher_ = std::make_unique<LifeWatcher>(
      [this](int peer, const std::string& how) { set_status(peer, PeerStatus::kLost, how); },
      [this](int peer) { set_status(peer, PeerStatus::kLeft, kEndedWithoutError); });
}

void Engine::attach_shared(int peer_rank, FileDescriptor descriptor, FileDescriptor bell, FileDescriptor record,
                           FileDescriptor socket) {
  attach_arena(peer_rank, std::make_shared<Arena>(Arena::attach(std::move(descriptor), std::move(bell))),
               FlightRecord::attach(std::move(record)), std::move(socket));
}

void Engine::attach_thread(int peer_rank, const Engine& engine) {
  attach_arena(peer_rank, engine.arena_, engine.record_, {});
}

void Engine::attach_arena(int peer_rank, std::shared_ptr<Arena> arena, std::shared_ptr<FlightRecord> record,
                          FileDescriptor socket) {
  Peer& peer = *peers_[index(peer_rank)];
  peer.arena = std::move(arena);
  peer.record = std::move(record);
  peer.socket = std::move(socket);
  ArenaHeader& theirs = peer.arena->header();
  peer.pid = theirs.pid;
  const ArenaHeader& ours = arena_->header();
  const size_t capacity = ring_capacity(world_size());
  peer.memory = std::make_unique<PeerMemory>(*peer.arena, peer.socket ? peer.socket.get() : -1);
  if (theirs.rank != peer_rank || theirs.ring_capacity != capacity)
    throw std::runtime_error("rank " + std::to_string(peer_rank) + " sent the arena of another rank or world");
  const size_t stride = ring_stride(capacity);
  std::byte* outgoing = arena_->at_line(ours.rings + stride * index(peer_rank), stride);
  std::byte* incoming = peer.arena->at_line(theirs.rings + stride * index(rank()), stride);
  peer.board =
      reinterpret_cast<const WaitEdgeBoard*>(peer.arena->at_line(theirs.wait_edge_board, sizeof(WaitEdgeBoard)));
  const SingleCopy single_copy{
      .mine = reinterpret_cast<ExposureTable*>(arena_->at_line(exposure_table(ours, peer_rank), sizeof(ExposureTable))),
      .theirs = reinterpret_cast<const ExposureTable*>(
          peer.arena->at_line(exposure_table(theirs, rank()), sizeof(ExposureTable))),
      .peer = peer.memory.get(),
      .own = arena_.get()};
  const Arena* bell = peer.arena.get();
  const std::lock_guard lock(messages_mutex_);
  messages_.attach(peer_rank,
                   std::make_unique<RingChannel>(reinterpret_cast<Ring*>(outgoing), reinterpret_cast<Ring*>(incoming),
                                                 capacity, [bell] { bell->wake(); }),
                   &single_copy);
  if (watcher_) watcher_->watch(peer_rank, theirs.life, peer.socket.get());
}

void Engine::attach_socket(int peer_rank, FileDescriptor socket, int64_t pid) {
  Peer& peer = *peers_[index(peer_rank)];
  peer.pid = pid;
  uses_sockets_ = true;
  const std::lock_guard lock(messages_mutex_);
  peer.board = waits_.add(peer_rank);
  messages_.attach(peer_rank, std::make_unique<TcpChannel>(std::move(socket)));
}

PeerStatus Engine::peer_status(int peer) const { return peers_[index(peer)]->status.load(std::memory_order_acquire); }

// A rank of this host has posted its exception before its life word changes.
std::optional<MemberEnd> Engine::end_of(int peer_rank) const {
  using How = MemberEnd::How;
  const PeerStatus status = peer_status(peer_rank);
  std::optional<Failure> raised;
  if (peer_arena(peer_rank) != nullptr) {
    raised = exit_in_memory(peer_rank);
  } else {
    const std::lock_guard lock(messages_mutex_);
    if (const Failure* sent = messages_.exit_failure(peer_rank)) raised = *sent;
  }
  if (raised && raised->as<Failed>()->sudden) return MemberEnd{How::kRaised, *std::move(raised)};
  if (status == PeerStatus::kPresent)
    return raised ? std::optional(MemberEnd{How::kEnding, *std::move(raised)}) : std::nullopt;
  const Peer& peer = *peers_[index(peer_rank)];
  const bool left = status == PeerStatus::kLeft;
  const How how = left ? How::kLeft : How::kLost;
  if (raised) return MemberEnd{how, *std::move(raised)};
  return MemberEnd{how, Lost{.peer = peer_rank, .pid = peer.pid, .host = peer.host, .reason = peer.how, .left = left}};
}

void Engine::identify(Lost& lost, int peer_rank) const {
  if (lost.pid != 0) return;
  lost.pid = peers_[index(peer_rank)]->pid;
  lost.host = peers_[index(peer_rank)]->host;
}

std::optional<Failure> Engine::exit_in_memory(int peer_rank) const {
  const Arena* arena = peer_arena(peer_rank);
  const uint64_t offset = arena == nullptr ? 0 : arena->header().exit_record.load(std::memory_order_acquire);
  if (offset == 0) return std::nullopt;
  try {
    const size_t bytes = largest_record(world_size());
    const std::optional<Failure> stated = decode({arena->at(offset, bytes), bytes}, world_size());
    const Failed* failed = stated ? stated->as<Failed>() : nullptr;
    if (failed == nullptr) return std::nullopt;
    return Failed{.peer = peer_rank, .reason = failed->reason, .sudden = failed->sudden};
  } catch (const std::out_of_range&) {
    return std::nullopt;  // the peer wrote it
  }
}

void Engine::fail(const RecordedFailure& failure, bool at_once) {
  if (forked() || shut_down_) return;
  if (at_once) aborting_.store(true, std::memory_order_release);  // first: the others may leave because of the record
  if (!failed_.exchange(true)) {
    record_->end(RankState::kFailed, failure);
    post_exit(failure.reason, at_once);
  }
  if (!at_once) return;
  aborted_.store(true, std::memory_order_release);
  announce_news();
  for (const auto& peer : peers_)
    if (peer->arena) peer->arena->wake();
}

void Engine::post_exit(const std::string& reason, bool at_once) {
  const Failure failure = Failed{.reason = reason, .sudden = at_once};
  const std::vector<std::byte> record = encode(failure, world_size());
  std::memcpy(arena_->at(exit_record_, record.size()), record.data(), record.size());
  arena_->header().exit_record.store(exit_record_, std::memory_order_seq_cst);
  const std::lock_guard lock(messages_mutex_);
  for (int peer = 0; peer < world_size(); ++peer)
    if (peer != rank() && peer_arena(peer) == nullptr) messages_.post_exit(peer, failure);
}

// Ranks of other hosts see only the end of the connection, which may be a loss.
void Engine::post_left() {
  if (failed_) return;
  const std::lock_guard lock(messages_mutex_);
  for (int peer = 0; peer < world_size(); ++peer)
    if (peer != rank() && peer_arena(peer) == nullptr) messages_.post(peer, kLeftKey, {});
}

void Engine::set_status(int peer_rank, PeerStatus status, std::string how) {
  Peer& peer = *peers_[index(peer_rank)];
  peer.how = std::move(how);
  peer.status.store(status, std::memory_order_release);
  news_.fetch_add(1, std::memory_order_release);
  {
    const std::lock_guard lock(messages_mutex_);
    messages_.fail_peer(peer_rank, end_of(peer_rank)->why);
  }
  kick();
}

bool Engine::is_quiet() {
  const std::lock_guard lock(messages_mutex_);
  for (int turn = 0; pump(); ++turn)
    if (turn == kTurnsToQuiet) return false;
  return messages_.is_quiet();
}

void Engine::subscribe(int peer) {
  if (!uses_sockets_) return;
  const std::lock_guard lock(messages_mutex_);
  waits_.subscribe(peer);
}

void Engine::publish() {
  if (!uses_sockets_) return;
  const std::lock_guard lock(messages_mutex_);
  waits_.publish(*board_);
}

void Engine::announce(const std::vector<WaitEdge>& cycle) {
  if (!uses_sockets_) return;
  const std::lock_guard lock(messages_mutex_);
  waits_.announce(cycle);
}

bool Engine::pump() {
  const bool moved = messages_.pump();
  if (waits_.has_queries() && can_answer())
    waits_.answer([this](uint64_t group, uint64_t captured) {
      const FlightRecordView record = record_->view();
      return WaitEdgeExchange::Answer{activity(record, group), runs_replay(record, group, captured)};
    });
  return moved;
}

NamedGroup Engine::group_of(uint64_t identity) const {
  const std::lock_guard lock(names_mutex_);
  const auto found = names_.find(identity);
  return found == names_.end() ? NamedGroup{} : found->second;
}

void Engine::set_global_ranks(std::vector<int> ranks) {
  const std::lock_guard lock(names_mutex_);
  if (recorded_ranks_.empty()) recorded_ranks_ = ranks;
  global_ranks_ = std::move(ranks);
}

int Engine::global_rank(int world_rank) const {
  const std::lock_guard lock(names_mutex_);
  return global_ranks_.empty() ? world_rank : global_ranks_[index(world_rank)];
}

int Engine::recorded_rank(int world_rank) const {
  const std::lock_guard lock(names_mutex_);
  return recorded_ranks_.empty() ? world_rank : recorded_ranks_[index(world_rank)];
}

std::vector<int> Engine::gone_ranks() const {
  std::vector<int> gone;
  for (int peer = 0; peer < world_size(); ++peer)
    if (peer != rank() && (end_of(peer) || is_unreachable(peer))) gone.push_back(peer);
  return gone;
}

bool Engine::is_unreachable(int peer) const {
  const std::lock_guard lock(messages_mutex_);
  return messages_.peer_failure(peer) != nullptr;
}

void Engine::add_name(uint64_t group, NamedGroup named) {
  const std::lock_guard lock(names_mutex_);
  names_.insert_or_assign(group, std::move(named));
}

void Engine::remove_name(uint64_t group) {
  const std::lock_guard lock(names_mutex_);
  names_.erase(group);
}

void Engine::kick() { arena_->wake(); }

void Engine::completed() {
  {
    const std::lock_guard lock(completions_mutex_);
    ++completions_;
    completions_changed_.notify_all();
  }
  kick();
}

uint64_t Engine::await_completions(uint64_t seen, double seconds) {
  std::unique_lock lock(completions_mutex_);
  completions_changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return completions_ > seen; });
  return completions_;
}

void Engine::sleep(int64_t nanoseconds, const std::function<bool()>& ready) {
  if (uses_sockets_) return sleep_on_sockets(nanoseconds, ready);
  ArenaHeader& header = arena_->header();
  // Announce the sleep first, check last: a thread that changes a flag after the check sees the sleeper, and rings.
  header.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t rung = header.doorbell.load(std::memory_order_seq_cst);
  if (!ready()) futex_wait(header.doorbell, rung, nanoseconds);
  header.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void Engine::sleep_on_sockets(int64_t nanoseconds, const std::function<bool()>& ready) {
  ArenaHeader& header = arena_->header();
  header.sleepers.fetch_add(1, std::memory_order_seq_cst);  // peers of this host look there first
  header.socket_sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (!ready()) {
    std::vector<pollfd> polled;
    polled.push_back({.fd = arena_->bell(), .events = POLLIN, .revents = 0});
    {
      const std::lock_guard lock(messages_mutex_);
      messages_.descriptors(polled);
    }
    const timespec timeout{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    ppoll(polled.data(), polled.size(), &timeout, nullptr);
  }
  header.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  // The last one to wake takes the wake away, so that it wakes everybody who slept.
  if (header.socket_sleepers.fetch_sub(1, std::memory_order_seq_cst) == 1) {
    uint64_t wakes = 0;
    static_cast<void>(!read(arena_->bell(), &wakes, sizeof wakes));
  }
}

bool Engine::flush(double seconds) {
  const Deadline deadline = Deadline::after(seconds);
  for (;;) {
    {
      const std::lock_guard lock(messages_mutex_);
      pump();
      if (messages_.flushed()) return true;
    }
    if (deadline.passed()) return false;
    sleep(deadline.remaining_ns(5'000'000), [] { return false; });
  }
}

std::vector<int> Engine::unsent_to() {
  const std::lock_guard lock(messages_mutex_);
  return messages_.unsent_to();
}

void Engine::shutdown() {
  if (shut_down_ || forked()) return;
  shut_down_ = true;
  progress_->stop();
  if (observer_) observer_->stop();
  record_->end(failed_.load() ? RankState::kFailed : RankState::kLeft);
  watcher_.reset();
  if (life_lock_) life_lock_->release();
  for (const auto& peer : peers_) peer->socket.reset();
  if (!uses_sockets_) return;
  post_left();
  flush(kLastWordsSeconds);
  // Peers over TCP see the end of the connection.
  const std::lock_guard lock(messages_mutex_);
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) messages_.fail_peer(peer, Broken{"this rank left the group"});
  }
}

void Engine::abandon() {
  forked_.store(true, std::memory_order_relaxed);
  arena_->abandon();
  for (const auto& peer : peers_)
    if (peer->arena) peer->arena->abandon();
}

}  // namespace procgroup
