#!/bin/sh
# Say in words what this machine lacks to build procgroup, before anything starts.
# On success: print the Python to use, and exit with 0. Otherwise: one paragraph per lack on stderr, and 1.
# PYTHON and CXX in the environment name a Python and a compiler of your own.

lacks=0

lack() { # what, why, packages of apt, packages of dnf
  lacks=$((lacks + 1))
  printf '\n%d. %s\n   %s\n' "$lacks" "$1" "$2" >&2
  [ -z "$3" ] || printf '   Debian, Ubuntu:  apt-get install %s\n   Fedora, RHEL:    dnf install %s\n' "$3" "$4" >&2
}

system=$(uname -s 2>/dev/null || echo unknown)
if [ "$system" != Linux ]; then
  lack "procgroup builds on Linux only so far; this is $system." \
    "Its transport stands on memfd, futex and epoll. Use a Linux machine, container or virtual machine."
  exit 1
fi

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
  if new_enough "$candidate"; then
    python=$candidate
    break
  fi
done

if [ -z "$python" ]; then
  found=$("${PYTHON:-python3}" --version 2>&1) || found="no ${PYTHON:-python3}"
  lack "Python 3.11 or newer is missing (found: $found)." \
    "Install one, or name one: make PYTHON=/path/to/python3.12 ..." "python3 python3-venv python3-dev" "python3.12 python3.12-devel"
else
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    lack "Python's venv module is missing (of $python, version $version)." \
      "Everything is installed into a virtual environment of this folder, .venv." "python3-venv" "python3-pip"
  fi
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  if [ ! -f "$header" ]; then
    lack "Python's C header is missing (no $header)." \
      "The native module is compiled against it." "python3-dev" "python3-devel"
  fi
fi

compiler=
for candidate in ${CXX:-c++ g++ clang++}; do
  if command -v "$candidate" >/dev/null 2>&1; then
    compiler=$candidate
    break
  fi
done

if [ -z "$compiler" ]; then
  lack "A C++ compiler is missing (looked for: ${CXX:-c++, g++, clang++})." \
    "The native module is C++20: g++ 11 or newer, or clang++ 14 or newer." "build-essential" "gcc-c++ make"
else
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  cat >"$scratch/probe.cpp" <<'PROBE'
#include <bit>
#include <concepts>
#include <span>
template <std::integral T> T twice(std::span<T> x) { return static_cast<T>(std::popcount(x.size()) + x[0]); }
struct S { int a; bool operator==(const S&) const = default; };
int main() { unsigned x[] = {0}; return static_cast<int>(twice(std::span<unsigned>(x)) - 1u) + !(S{.a = 1} == S{1}); }
PROBE
  if ! "$compiler" -std=c++20 -o "$scratch/probe" "$scratch/probe.cpp" >"$scratch/log" 2>&1; then
    lack "The C++ compiler cannot build a C++20 program ($compiler: $("$compiler" --version 2>&1 | head -n 1))." \
      "g++ 11 or newer, or clang++ 14 or newer; name one with CXX=... It said: $(head -n 1 "$scratch/log")" "build-essential" "gcc-c++"
  fi
fi

if [ "$lacks" -gt 0 ]; then
  printf '\nprocgroup cannot be built here yet: see above (%d). Then run make again.\n' "$lacks" >&2
  exit 1
fi
echo "$python"
