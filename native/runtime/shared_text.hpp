// A text in shared memory that one writer replaces and anybody reads, at any time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

namespace procgroup {

// A seqlock: the version is odd while the text is written, also for ever when its writer dies there. One writer at a
// time. Characters are kept in words because a reader may look while they change.
template <size_t kBytes>
class SharedText {
 public:
  static_assert(kBytes % sizeof(uint64_t) == 0);

  // What fits is written; `ns` is any moment that belongs to it.
  void write(std::string_view text, int64_t ns) {
    const uint64_t version = version_.load(std::memory_order_relaxed) | 1;
    version_.store(version, std::memory_order_relaxed);
    const size_t bytes = std::min(text.size(), kBytes);
    ns_.store(static_cast<uint64_t>(ns), std::memory_order_release);
    bytes_.store(bytes, std::memory_order_release);
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min(sizeof word, bytes - at));
      words_[at / sizeof word].store(word, std::memory_order_release);
    }
    version_.store(version + 1, std::memory_order_release);
  }

  struct Value {
    std::string text;
    int64_t ns;
  };
  // Nothing before the first text, and while another is written.
  std::optional<Value> read() const {
    const uint64_t version = version_.load(std::memory_order_acquire);
    if (version == 0 || version % 2 != 0) return std::nullopt;
    Value value{std::string(std::min<size_t>(bytes_.load(std::memory_order_acquire), kBytes), '\0'),
                static_cast<int64_t>(ns_.load(std::memory_order_acquire))};
    for (size_t at = 0; at < value.text.size(); at += sizeof(uint64_t)) {
      const uint64_t word = words_[at / sizeof word].load(std::memory_order_acquire);
      std::memcpy(value.text.data() + at, &word, std::min(sizeof word, value.text.size() - at));
    }
    if (version_.load(std::memory_order_relaxed) != version) return std::nullopt;
    return value;
  }

 private:
  std::atomic<uint64_t> version_{0};
  std::atomic<uint64_t> ns_{0};
  std::atomic<uint64_t> bytes_{0};
  std::atomic<uint64_t> words_[kBytes / sizeof(uint64_t)]{};
};

}  // namespace procgroup
