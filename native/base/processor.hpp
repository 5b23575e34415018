// The processor: what a spinning core does, and a property that is not known when the library is compiled.
#pragma once

namespace procgroup {

// Between two looks at a flag.
inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Whether `rep movsb`, with which the C library and the kernel copy, is as fast as any other copy wherever source and
// destination begin. It is on Intel's processors, where it also fetches fewer of the lines that it overwrites (64 KiB
// into a slot that a peer has just read: 5.3 us, with any other stores 7.6). On AMD's Zen 3 it falls from 12 to 2.9
// GB/s when the destination is up to 63 bytes behind the source modulo a page. NumPy's arrays, which begin 16 bytes
// into a page, and slots, which begin a page, are such a pair.
inline bool has_fast_string_copies() {
#if defined(__x86_64__)
  static const bool fast = (__builtin_cpu_init(), __builtin_cpu_is("intel") != 0);
  return fast;
#else
  return false;
#endif
}

}  // namespace procgroup
