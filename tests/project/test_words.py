"""The words that `make check` refuses are those of the style's tables, with what to write in their place."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import world

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_words", ROOT / "tools" / "check_words.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("src/procgroup/log.py", "one of the Sla" + "bs", "allocation, receive pool"),
        ("tests/world.py", "a loop in a cir" + "cle", "cycle"),
        ("docs/start.md", "what never li" + "es", ""),
        ("docs/start.md", "the wait is o" + "ver", "has completed, has ended"),
        ("docs/start.md", "the wait is over the limit", ""),
        ("src/procgroup/log.py", "socket." + "getfqdn()", "a host's own name may not resolve; publish addresses"),
        ("tests/world.py", "socket." + "getfqdn()", ""),
        ("src/procgroup/groups/pickling.py", "pickle." + "loads(data)", ""),
    ],
)
def test_a_word_is_refused_with_what_the_table_has_beside_it(
    tool: ModuleType, name: str, line: str, reason: str
) -> None:
    assert [found.rpartition(": ")[2] for found in tool.refused(name, ["", line])] == ([reason] if reason else [])


def test_every_row_of_both_tables_is_read(tool: ModuleType) -> None:
    page = (ROOT / tool.STYLE).read_text()
    for heading in (tool.WORDS, tool.CALLS):
        section = page.split(f"\n{heading}\n")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        reasons = [row.rsplit(" | ", 1)[1].removesuffix(" |") for row in rows]
        assert list(dict.fromkeys(tool.rules(heading).values())) == list(dict.fromkeys(reasons))


def test_a_line_with_a_forbidden_word_is_named(tmp_path: Path) -> None:
    package = tmp_path / "src" / "procgroup"
    package.mkdir(parents=True)
    (package / "names.py").write_text("import socket\nname = socket.getfqdn()\n")
    for name in ("tools/check_words.py", "docs/design/style.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    done = world.run_command(["python3", "tools/check_words.py"], directory=tmp_path)
    assert (done.returncode, done.stdout.split(": ")[:2]) == (1, ["src/procgroup/names.py:2", "getfqdn"])
