// Copies move exactly the bytes they are asked for, wherever source and destination begin: also those that are not
// used on this processor.
#include "base/copy.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "tests/check.hpp"

namespace procgroup::testing {
namespace {

std::byte value(size_t index) { return static_cast<std::byte>(index * 31 % 251); }

// The destination's neighbours must stay as they were. Vectors end with their last byte, so that reading beyond is
// seen.
void copies(CopyFunction copy, size_t to, size_t from, size_t bytes) {
  CASE("%zu bytes from offset %zu to offset %zu", bytes, from, to);
  constexpr auto kUntouched = std::byte{255};
  std::vector<std::byte> source(from + bytes);
  for (size_t index = 0; index < source.size(); ++index) source[index] = value(index);
  std::vector<std::byte> target(to + bytes + 1, kUntouched);
  std::vector<std::byte> expected = target;
  std::copy(source.begin() + static_cast<std::ptrdiff_t>(from), source.end(),
            expected.begin() + static_cast<std::ptrdiff_t>(to));
  copy(target.data() + to, source.data() + from, bytes);
  CHECK_EQUAL(target, expected);
}

void every_copy_moves_what_it_is_asked_for() {
  const std::pair<const char*, CopyFunction> functions[] = {{"copy_by_library", copy_by_library},
                                                            {"copy_by_lines", copy_by_lines},
                                                            {"copy_cached", copy_cached},
                                                            {"copy_streaming", copy_streaming}};
  for (const auto& [name, copy] : functions) {
    CASE("%s", name);
    for (const size_t to : {0, 1, 16, 63})
      for (const size_t from : {0, 1, 8, 63})
        for (const size_t bytes : {0, 1, 15, 63, 64, 65, 127, 128, 1000, 4096, 10'001}) copies(copy, to, from, bytes);
  }
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup::testing;
  RUN_TEST(every_copy_moves_what_it_is_asked_for);
}
