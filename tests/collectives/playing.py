"""Playing cases and programs on one rank, and judging what all ranks saw."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import pytest
from seeded_cases import Case, CasePart

import procgroup as dist
from oracle import digest
from world import WorldFailed

Report = tuple[str, str]
"""What is wrong with a result, and the hash of a result that is the same on all ranks."""


def play(rank: int, size: int, cases: Sequence[Case], timeout: float = 20.0) -> list[Report]:
    """Play cases one after the other, blocking and async by turns."""
    dist.init_process_group(timeout=timeout)
    reports = [play_one(case, rank, size, async_op=bool(number % 2)) for number, case in enumerate(cases)]
    dist.barrier()
    dist.destroy_process_group()
    return reports


def play_one(case: Case, rank: int, size: int, async_op: bool) -> Report:
    part = CasePart(case, rank, size)
    try:
        part.start(dist, async_op)
        part.wait()
    except Exception as error:
        raise AssertionError(f"rank {rank} of {size}, {case}: {type(error).__name__}: {error}") from error
    return report(part)


Arguments = ParamSpec("Arguments")
Played = TypeVar("Played")


def once(play: Callable[Arguments, Played]) -> Callable[Arguments, Played]:
    """Let a world be played once for all tests of it; each of them raises its WorldFailed."""
    failures: dict[Any, WorldFailed] = {}
    results: dict[Any, Played] = {}

    @wraps(play)
    def played(*arguments: Arguments.args, **named: Arguments.kwargs) -> Played:
        key = (arguments, *named.items())
        if key not in results and key not in failures:
            try:
                results[key] = play(*arguments, **named)
            except WorldFailed as error:
                failures[key] = error
        if key in failures:
            raise failures[key].with_traceback(None)
        return results[key]

    return played


Programs = Mapping[str, Callable[[int, int], None]]
"""What ranks of one world do in turn, on the default group; the name of each says what must come of it."""


def play_programs(
    programs: Programs, rank: int, size: int, surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> dict[str, str]:
    """Return what went wrong in each program: "" where nothing did. After the first that fails no other is played."""
    became: dict[str, str] = {}
    for name, function in programs.items():
        try:
            with surroundings():
                function(rank, size)
            became[name] = ""
        except (Exception, pytest.fail.Exception):
            became[name] = traceback.format_exc()
            break  # the ranks may be out of step
    return became


def nothing_went_wrong(name: str, ranks: Iterable[Mapping[str, str]]) -> None:
    """Fail where a program was not played to its end on every rank."""
    wrong = [became.get(name, "not played: an earlier program failed") for became in ranks]
    texts = [f"\nrank {rank}: {text}" for rank, text in enumerate(wrong) if text]
    assert not texts, "".join(texts)


def report(part: CasePart) -> Report:
    return part.wrong(), digest(part.held[0].array) if part.name == "all_reduce" else ""


def all_right(cases: Sequence[object], results: Sequence[Sequence[Report]], where: str = "") -> None:
    """Fail, naming cases and ranks, unless every result was right and alike on all ranks."""
    wrong = []
    for number, case in enumerate(cases):
        reports = [result[number] for result in results]
        wrong += [f"{case}, rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text]
        if len({bits for _, bits in reports}) != 1:
            wrong.append(f"{case}: the ranks have different results: {[bits for _, bits in reports]}")
    assert not wrong, f"{where}{len(wrong)} of {len(cases)} cases are wrong:\n" + "\n".join(wrong[:10])
