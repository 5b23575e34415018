// Copying large ranges of bytes that do not overlap.
#pragma once

#include <cstddef>

namespace procgroup {

// The bytes stay in the caches, where a peer or the caller soon reads them.
void copy_cached(void* to, const void* from, size_t bytes);
// The bytes go past the caches, which need not fetch what is overwritten: for results that the caches cannot hold.
void copy_streaming(void* to, const void* from, size_t bytes);

using CopyFunction = void (*)(void* to, const void* from, size_t bytes);

// The two that copy_cached() chooses from. The C library's memcpy uses `rep movsb` for large ranges: base/processor.hpp
// says where that is good.
void copy_by_library(void* to, const void* from, size_t bytes);
void copy_by_lines(void* to, const void* from, size_t bytes);

}  // namespace procgroup
