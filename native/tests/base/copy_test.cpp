// Copies move exactly the bytes they are asked for, wherever source and destination begin: also those that are not
// used on this processor.
#include "base/copy.hpp"

#include <cstdio>
#include <vector>

#include "tests/check.hpp"

namespace procgroup::testing {
namespace {

std::byte value(size_t index) { return static_cast<std::byte>(index * 31 % 251); }

// The destination's neighbours must stay as they were. Vectors end with their last byte, so that reading beyond is
// seen.
void copies(CopyFunction copy, size_t to, size_t from, size_t bytes) {
  constexpr auto kUntouched = std::byte{255};
  std::vector<std::byte> source(from + bytes);
  for (size_t index = 0; index < source.size(); ++index) source[index] = value(index);
  std::vector<std::byte> target(to + bytes + 1, kUntouched);
  copy(target.data() + to, source.data() + from, bytes);
  for (size_t index = 0; index < target.size(); ++index) {
    const bool copied = index >= to && index < to + bytes;
    CHECK(target[index] == (copied ? value(index - to + from) : kUntouched));
  }
}

}  // namespace
}  // namespace procgroup::testing

int main() {
  using namespace procgroup;
  for (const CopyFunction copy : {copy_by_library, copy_by_lines, copy_cached, copy_streaming})
    for (const size_t to : {0, 1, 16, 63})
      for (const size_t from : {0, 1, 8, 63})
        for (const size_t bytes : {0, 1, 15, 63, 64, 65, 127, 128, 1000, 4096, 10'001})
          testing::copies(copy, to, from, bytes);
  std::puts("copy_test: passed");
}
