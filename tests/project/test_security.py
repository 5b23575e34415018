"""SECURITY.md is true of pickles: which calls read those of other ranks, and that procgroup itself trusts none."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import procgroup as dist

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "procgroup"

MOVES_OBJECTS = re.compile(r"(objects\.\w+|\w+_object(_list)?)$")


def calls_that_move_objects(source: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and MOVES_OBJECTS.match(ast.unparse(node.func)):
            yield node


def test_security_lists_the_calls_that_unpickle() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    sentence = re.search(r"unpickle the objects of other ranks:\n(.*?)\.", text, re.DOTALL)
    assert sentence
    listed = set(re.findall(r"`(\w+)`", sentence[1]))
    named = {name for name in dir(dist) if inspect.isfunction(getattr(dist, name))}
    assert listed == {name for name in named if "safe" in inspect.signature(getattr(dist, name)).parameters}


def test_procgroup_reads_its_own_objects_with_safe() -> None:
    package = SOURCES / "groups"
    found = []
    for source in SOURCES.rglob("*.py"):
        if source.is_relative_to(package) or source == SOURCES / "api" / "objects.py":
            continue
        for call in calls_that_move_objects(source):
            found.append(source.stem)
            keywords = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert keywords.get("safe") == "True", f"{source}:{call.lineno} trusts the sender"
    assert "rank_comparison" in found


def test_one_file_alone_unpickles_what_other_processes_send() -> None:
    """The two others exchange files with the process that they started, in a folder of this user's alone."""
    loads = re.compile(r"\b(?:pickle|marshal|shelve|dill|cloudpickle)\.\w*(?:load|Unpickler)\w*|import pickle\b")
    found = {source.name for source in SOURCES.rglob("*.py") if loads.search(source.read_text())}
    assert found == {"pickling.py", "elastic.py", "function_worker.py"}
