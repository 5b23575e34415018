// Strided arrays against the plainest thing that is right: the address of every element, one by one.
#include "dtype/strided.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/check.hpp"

using namespace procgroup;

namespace {

constexpr size_t kMemory = 4096;

// The address of each element, in C order.
std::vector<std::byte*> addresses(const Strided& array) {
  std::vector<std::byte*> found{array.base};
  for (size_t dimension = 0; dimension < array.shape.size(); ++dimension) {
    std::vector<std::byte*> next;
    for (std::byte* at : found)
      for (ptrdiff_t index = 0; index < array.shape[dimension]; ++index)
        next.push_back(at + index * array.strides[dimension]);
    found = std::move(next);
  }
  return found;
}

// Every byte that the elements cover, as often as they cover it.
std::multiset<const std::byte*> covered(const Strided& array) {
  std::multiset<const std::byte*> bytes;
  for (const std::byte* at : addresses(array))
    for (size_t byte = 0; byte < array.element_bytes; ++byte) bytes.insert(at + byte);
  return bytes;
}

std::string text_of(const Strided& array) {
  std::string text = std::to_string(array.element_bytes) + " bytes, shape";
  for (const ptrdiff_t length : array.shape) text.append(" ").append(std::to_string(length));
  text += ", strides";
  for (const ptrdiff_t stride : array.strides) text.append(" ").append(std::to_string(stride));
  return text;
}

std::vector<std::byte> gathered(const Strided& array) {
  std::vector<std::byte> elements;
  for (const std::byte* at : addresses(array)) elements.insert(elements.end(), at, at + array.element_bytes);
  return elements;
}

// Layouts of all sorts in one block of memory; the same ones on every machine and in every run.
class Layouts {
 public:
  explicit Layouts(std::vector<std::byte>& memory) : memory_(memory) {}

  Strided next() {
    for (;;) {
      Strided array{.base = nullptr, .element_bytes = kElements[below(kElements.size())], .shape = {}, .strides = {}};
      const bool as_rows = below(3) != 0;  // else the strides are any numbers of bytes
      auto step = static_cast<ptrdiff_t>(array.element_bytes);
      for (size_t dimensions = below(5); dimensions > 0; --dimensions) {
        const auto length = static_cast<ptrdiff_t>(below(5));
        const auto stride = as_rows ? step : static_cast<ptrdiff_t>(below(97)) - 48;
        array.shape.insert(array.shape.begin(), length);
        array.strides.insert(array.strides.begin(), below(5) == 0 ? -stride : stride);
        step *= std::max<ptrdiff_t>(length, 1) + static_cast<ptrdiff_t>(below(2));
      }
      if (as_rows && below(3) == 0) turn(array);
      if (place(array)) return array;
    }
  }

 private:
  static constexpr std::array<size_t, 6> kElements{1, 2, 4, 8, 16, 3};

  size_t below(size_t limit) { return random_() % limit; }

  void turn(Strided& array) {
    if (array.shape.size() < 2) return;
    const size_t other = below(array.shape.size());
    std::swap(array.shape[0], array.shape[other]);
    std::swap(array.strides[0], array.strides[other]);
  }

  // Place all elements in the memory; false when they do not fit.
  bool place(Strided& array) {
    ptrdiff_t lowest = 0;
    auto highest = static_cast<ptrdiff_t>(array.element_bytes);
    for (size_t dimension = 0; dimension < array.shape.size(); ++dimension) {
      const ptrdiff_t reach = array.strides[dimension] * std::max<ptrdiff_t>(array.shape[dimension] - 1, 0);
      (reach < 0 ? lowest : highest) += reach;
    }
    const ptrdiff_t room = static_cast<ptrdiff_t>(memory_.size()) - (highest - lowest);
    if (room < 0) return false;
    array.base = memory_.data() - lowest + below(static_cast<size_t>(room) + 1);
    return true;
  }

  std::vector<std::byte>& memory_;
  std::mt19937 random_{testing::test_seed(20260)};
};

void fill(std::vector<std::byte>& memory) {
  for (size_t index = 0; index < memory.size(); ++index) memory[index] = static_cast<std::byte>(index * 31 >> 3);
}

void elements_are_packed_in_c_order_and_unpacked_to_where_they_were() {
  std::vector<std::byte> memory(kMemory);
  fill(memory);
  const std::vector<std::byte> before = memory;
  Layouts layouts(memory);
  for (int turn = 0; turn < 2000; ++turn) {
    const Strided array = layouts.next();
    CASE("turn %d, %s", turn, text_of(array).c_str());
    const std::vector<std::byte> wanted = gathered(array);
    CHECK(array.count() * array.element_bytes == wanted.size());
    std::vector<std::byte> packed(wanted.size() + 1, std::byte{0xee});
    array.pack(packed.data());
    CHECK(std::equal(wanted.begin(), wanted.end(), packed.begin()) && packed.back() == std::byte{0xee});
    array.unpack(packed.data());
    CHECK(memory == before);
  }
}

void unpacking_writes_the_elements_and_nothing_else() {
  std::vector<std::byte> memory(kMemory);
  Layouts layouts(memory);
  for (int turn = 0; turn < 1000; ++turn) {
    const Strided array = layouts.next();
    CASE("turn %d, %s", turn, text_of(array).c_str());
    if (array.overlaps_itself()) continue;
    fill(memory);
    std::vector<std::byte> wanted = memory;
    std::vector<std::byte> packed(array.count() * array.element_bytes);
    for (size_t index = 0; index < packed.size(); ++index) packed[index] = static_cast<std::byte>(index + 1);
    const std::byte* from = packed.data();
    for (std::byte* at : addresses(array)) {
      std::memcpy(wanted.data() + (at - memory.data()), from, array.element_bytes);
      from += array.element_bytes;
    }
    array.unpack(packed.data());
    CHECK(memory == wanted);
  }
}

void turned_arrays_of_any_number_of_tiles_are_packed_and_unpacked() {
  std::mt19937 random(testing::test_seed(7));
  for (int turn = 0; turn < 300; ++turn) {
    const std::array<size_t, 6> sizes{1, 2, 4, 8, 16, 3};
    const auto bytes = static_cast<ptrdiff_t>(sizes[random() % sizes.size()]);
    const std::array<ptrdiff_t, 3> lengths{ptrdiff_t(random() % 3 + 1), ptrdiff_t(random() % 50 + 1),
                                           ptrdiff_t(random() % 50 + 1)};
    const std::array<ptrdiff_t, 3> strides{lengths[1] * lengths[2] * bytes, lengths[2] * bytes, bytes};
    std::array<size_t, 3> order{0, 1, 2};
    std::ranges::shuffle(order, random);
    std::vector<std::byte> memory(static_cast<size_t>(lengths[0] * strides[0]));
    Strided array{memory.data(), static_cast<size_t>(bytes), {}, {}};
    for (const size_t dimension : order) {
      const bool upwards = random() % 4 == 0;
      if (upwards) array.base += strides[dimension] * (lengths[dimension] - 1);
      array.shape.push_back(lengths[dimension]);
      array.strides.push_back(upwards ? -strides[dimension] : strides[dimension]);
    }
    CASE("turn %d, %s", turn, text_of(array).c_str());
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
    const std::vector<std::byte> before = memory;
    std::vector<std::byte> packed(memory.size());
    array.pack(packed.data());
    CHECK(packed == gathered(array));
    std::ranges::fill(memory, std::byte{0});
    array.unpack(packed.data());
    CHECK(memory == before);
  }
}

void an_array_is_contiguous_when_each_element_follows_the_one_before() {
  std::vector<std::byte> memory(kMemory);
  Layouts layouts(memory);
  int contiguous = 0;
  for (int turn = 0; turn < 3000; ++turn) {
    const Strided array = layouts.next();
    CASE("turn %d, %s", turn, text_of(array).c_str());
    const std::vector<std::byte*> found = addresses(array);
    bool follows = true;
    for (size_t index = 0; index < found.size(); ++index)
      follows = follows && found[index] == array.base + index * array.element_bytes;
    CHECK(array.is_contiguous() == follows);
    contiguous += static_cast<int>(follows);
  }
  CHECK(contiguous > 300 && contiguous < 2700);
}

void arrays_that_fill_a_block_in_any_order_are_found() {
  std::vector<std::byte> memory(kMemory);
  Layouts layouts(memory);
  int filling = 0;
  for (int turn = 0; turn < 3000; ++turn) {
    const Strided array = layouts.next();
    if (array.count() == 0) continue;
    CASE("turn %d, %s", turn, text_of(array).c_str());
    const std::multiset<const std::byte*> bytes = covered(array);
    const std::set<const std::byte*> distinct(bytes.begin(), bytes.end());
    const bool fills = distinct.size() == bytes.size() && *distinct.begin() == array.base &&
                       *distinct.rbegin() == array.base + bytes.size() - 1;
    CHECK(array.fills_a_block() == fills);
    filling += static_cast<int>(fills);
  }
  CHECK(filling > 100 && filling < 2900);
}

void orders_differ_where_elements_are_elsewhere() {
  const Strided rows{.element_bytes = 4, .shape = {2, 3}, .strides = {12, 4}};
  const Strided columns{.element_bytes = 4, .shape = {2, 3}, .strides = {4, 8}};
  const Strided turned{.element_bytes = 4, .shape = {3, 2}, .strides = {4, 12}};
  CHECK(rows.order() != columns.order() && rows.order() != turned.order() && columns.order() != turned.order());
  CHECK(rows.order() == Strided(rows).order() && rows.order() != 0);
}

void elements_that_share_a_byte_are_found() {
  std::vector<std::byte> memory(kMemory);
  Layouts layouts(memory);
  int shared = 0;
  for (int turn = 0; turn < 3000; ++turn) {
    const Strided array = layouts.next();
    CASE("turn %d, %s", turn, text_of(array).c_str());
    const std::multiset<const std::byte*> bytes = covered(array);
    const bool twice = std::adjacent_find(bytes.begin(), bytes.end()) != bytes.end();
    CHECK(array.overlaps_itself() == twice);
    shared += static_cast<int>(twice);
  }
  CHECK(shared > 100 && shared < 2700);
}

void arrays_overlap_when_their_elements_do() {
  std::vector<std::byte> memory(600);  // small, so that both answers are frequent
  Layouts layouts(memory);
  int overlapping = 0;
  for (int turn = 0; turn < 3000; ++turn) {
    const Strided left = layouts.next();
    const Strided right = layouts.next();
    CASE("turn %d, %s; %s, %td bytes from there", turn, text_of(left).c_str(), text_of(right).c_str(),
         right.base - left.base);
    const std::multiset<const std::byte*> one = covered(left);
    bool meet = false;
    for (const std::byte* byte : covered(right)) meet = meet || one.contains(byte);
    CHECK(overlap(left, right) == meet);
    CHECK(overlap(right, left) == meet);
    overlapping += static_cast<int>(meet);
  }
  CHECK(overlapping > 100 && overlapping < 2900);
}

void of_many_arrays_any_two_that_overlap_are_found() {
  std::vector<std::byte> memory(1000);
  Layouts layouts(memory);
  int overlapping = 0;
  for (size_t turn = 0; turn < 2000; ++turn) {
    CASE("turn %zu", turn);
    std::vector<Strided> arrays(turn % 6);
    for (Strided& array : arrays) array = layouts.next();
    bool meet = false;
    for (size_t left = 0; left < arrays.size(); ++left)
      for (size_t right = 0; right < left; ++right) meet = meet || overlap(arrays[left], arrays[right]);
    CHECK(any_overlap(arrays) == meet);
    overlapping += static_cast<int>(meet);
  }
  CHECK(overlapping > 100 && overlapping < 1900);
}

void columns_of_one_matrix_do_not_overlap() {
  std::vector<std::byte> memory(size_t{100} * 6 * 8);
  const auto column = [&](size_t first, size_t wide) {
    return Strided{memory.data() + first * 8, 8, {100, static_cast<ptrdiff_t>(wide)}, {48, 8}};
  };
  CHECK(!overlap(column(0, 3), column(3, 3)));
  CHECK(!overlap(column(5, 1), column(0, 5)));
  CHECK(overlap(column(0, 3), column(2, 2)));
  CHECK(overlap(column(2, 2), column(0, 6)));
  const Strided upwards{memory.data() + 99 * 48 + 8, 8, {100}, {-48}};
  CHECK(!overlap(upwards, column(0, 1)) && overlap(upwards, column(1, 1)));
}

}  // namespace

int main() {
  testing::limit_seconds(100);
  RUN_TEST(elements_are_packed_in_c_order_and_unpacked_to_where_they_were);
  RUN_TEST(unpacking_writes_the_elements_and_nothing_else);
  RUN_TEST(turned_arrays_of_any_number_of_tiles_are_packed_and_unpacked);
  RUN_TEST(an_array_is_contiguous_when_each_element_follows_the_one_before);
  RUN_TEST(arrays_that_fill_a_block_in_any_order_are_found);
  RUN_TEST(orders_differ_where_elements_are_elsewhere);
  RUN_TEST(elements_that_share_a_byte_are_found);
  RUN_TEST(arrays_overlap_when_their_elements_do);
  RUN_TEST(of_many_arrays_any_two_that_overlap_are_found);
  RUN_TEST(columns_of_one_matrix_do_not_overlap);
}
