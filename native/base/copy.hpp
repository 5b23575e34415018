// Copying large ranges of bytes that do not overlap.
//
// The C library's memcpy uses `rep movsb` for them, which on some processors (AMD's Zen 3) falls from 12 to 2.9 GB/s
// when the destination lies up to 63 bytes behind the source modulo a page: as every array of NumPy does, 16 bytes into
// its first page, beside a slot, which begins one.
#pragma once

#include <cstddef>

namespace procgroup {

// The bytes stay in the caches, where a peer or the caller soon reads them.
void copy_cached(void* to, const void* from, size_t bytes);
// The bytes go past the caches, which need not fetch what is overwritten: for results that the caches cannot hold.
void copy_streaming(void* to, const void* from, size_t bytes);

using CopyFunction = void (*)(void* to, const void* from, size_t bytes);

}  // namespace procgroup
