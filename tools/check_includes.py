"""Refuse an #include that goes up: native packages include only those named before them in native/CMakeLists.txt."""

from __future__ import annotations

import re
import sys
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent / "native"
CMAKE = (NATIVE / "CMakeLists.txt").read_text()
ENGINE = re.findall(r"set\(PACKAGES (.+)\)", CMAKE)[0].split()
PACKAGES = ENGINE + re.findall(r"add_subdirectory\((\w+)\)", CMAKE)


def main() -> int:
    found = 0
    for path in sorted(NATIVE.glob("*/**/*.?pp")):
        package = path.relative_to(NATIVE).parts[0]
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            included = re.match(r'#include "(\w+)/', line)
            if included and PACKAGES.index(included.group(1)) > PACKAGES.index(package):
                print(f"{path.relative_to(NATIVE.parent)}:{number}: {package} may not include {included.group(1)}")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
