"""Write docs/reference/compat.md: every public name of torch.distributed, and where procgroup stands with it.

``python tests/compat/write.py`` writes the page; a test compares it with what this would write.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs/reference/compat.md"
TORCH = "torch.distributed"

if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(ROOT / "src")]

from compat.smoke_programs import SMOKE  # noqa: E402 - as a program, it needs the line above

# Modules whose names are those of torch.distributed under another address.
SAME_NAMES = ("distributed_c10d", "device_mesh", "rendezvous", "constants", "tensor.device_mesh")
MARKS = {
    "present": "works under `import procgroup as dist`; the linked program fails if the name does nothing",
    "plug-in": "torch's code, which runs on procgroup as torch's backend",
    "planned": "not implemented",
    "not applicable": "procgroup does not need it",
}

Names = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Standing:
    """What procgroup has of one name, and why."""

    name: str
    mark: str
    reason: str


def torch_names() -> Names:
    """Return what torch.distributed has: {module: {name: description}}."""
    program = [sys.executable, "-W", "ignore", str(HERE / "torch_names.py")]
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # without what procgroup's plug-in adds to torch
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=250, env=alone)
    names: Names = json.loads(done.stdout.splitlines()[-1])
    return names


@cache
def rules() -> list[tuple[str, str, str]]:
    """Return (pattern, mark, reason), the last one to win first."""
    scope = tomllib.loads((HERE / "scope.toml").read_text())
    ordered = [(pattern, rule["mark"], rule["reason"]) for rule in scope["rule"] for pattern in rule["names"]]
    return ordered[::-1]


def matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith(".*") else name == pattern


def own_name(module: str, name: str) -> str:
    """Return the name that a smoke program would have; empty for modules that procgroup has no part of."""
    is_ours = module == TORCH or module.removeprefix(TORCH + ".") in SAME_NAMES
    return name if is_ours else ""


def standing(module: str, name: str) -> Standing:
    """Return where procgroup stands with a name of a module."""
    own = own_name(module, name)
    if own in SMOKE and module != TORCH:
        return Standing(name, "present", "as in torch.distributed")
    if own in SMOKE:
        program = SMOKE[own].program
        file = program.__module__.rpartition(".")[2]
        return Standing(name, "present", f"[{program.__name__}](../../tests/compat/{file}.py)")
    full = f"{TORCH}.{name}" if own and module.endswith("distributed_c10d") else f"{module}.{name}"
    mark, reason = next((mark, reason) for pattern, mark, reason in rules() if matches(pattern, full))
    return Standing(name, mark, reason)


def members(name: str, description: dict[str, Any]) -> Iterator[Standing]:
    """Yield the standing of each member of a class that procgroup has."""
    for member in description["members"]:
        yield member_standing(name, member)


def member_standing(name: str, member: str) -> Standing:
    owner = "HashStore" if name.endswith("Store") and f"HashStore.{member}" in SMOKE else name
    if owner in ("ReduceOp", "DebugLevel") and member.isupper():
        return Standing(f"{name}.{member}", "present", SMOKE_OF_MEMBERS)
    found = standing(TORCH, f"{owner}.{member}")
    return Standing(f"{name}.{member}", found.mark, found.reason)


SMOKE_OF_MEMBERS = "[test_public_names](../../tests/api/test_public_names.py)"


def by_reason(standings: Iterable[Standing]) -> Iterator[str]:
    """Yield one line for the names that share a mark and a reason."""
    order = list(MARKS)
    ordered = sorted(standings, key=lambda one: (order.index(one.mark), one.reason, one.name))
    for (mark, reason), group in groupby(ordered, key=lambda one: (one.mark, one.reason)):
        yield f"- {mark}, {reason}: " + ", ".join(f"`{one.name}`" for one in group)


def table(standings: Iterable[Standing]) -> Iterator[str]:
    """Yield a row for each name."""
    yield "| name | mark | program or reason |"
    yield "|---|---|---|"
    for one in standings:
        yield f"| `{one.name}` | {one.mark} | {one.reason} |"


def all_standings(names: Names) -> dict[str, list[Standing]]:
    """Return the standing of every name, and of every member of a class that is present, by module."""
    found = {}
    for module, described in names.items():
        found[module] = [standing(module, name) for name in described]
        if module == TORCH:
            present = [one.name for one in found[module] if one.mark == "present"]
            found[module] += [member for name in present for member in members(name, described[name])]
    return found


def page(names: Names) -> str:
    """Return the page."""
    found = all_standings(names)
    counts = Counter(one.mark for standings in found.values() for one in standings)
    lines = [
        "# Names of torch.distributed",
        "",
        "This page lists every public name of torch.distributed 2.13, of its submodules and of the classes that",
        "procgroup has. A name that several modules export counts once for each. `tests/compat/write.py` generates the",
        "page; a test compares it and the signatures with torch.",
        "",
        "| mark | names | meaning |",
        "|---|---|---|",
        *(f"| {mark} | {counts[mark]} | {meaning} |" for mark, meaning in MARKS.items()),
    ]
    for module, standings in found.items():
        lines += ["", f"## {module}", "", *(table(standings) if module == TORCH else by_reason(standings))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(torch_names()))
