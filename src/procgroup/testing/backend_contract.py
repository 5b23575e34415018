"""The contract of a backend for arrays in CPU memory, as tests for the pytest suite of its author.

::

    class TestMine(BackendContract):
        backend = "mine"  # the name under which it is registered

Each test makes calls on worlds of 1 to 4 ranks, which are threads, and compares what the ranks have then with NumPy.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, TypeVar

import procgroup as dist
from procgroup.api.default_group import current
from procgroup.backends import capabilities
from procgroup.errors import DistBackendError, DistError, RanksFailed
from procgroup.groups.backend import Call, combining
from procgroup.groups.group import ProcessGroup
from procgroup.testing.backend_cases import OPERATIONS, Case, Part, play
from procgroup.testing.ranks import run_ranks

T = TypeVar("T")
Move = Callable[[Call], Iterator[Any]]
Waiting = Mapping[int, threading.Event]
"""The ranks that need elements of rank 0, with what is set when their ``move`` has waited for it."""

_SIZES = range(1, 5)
_LENGTHS = (0, 1, 2, 4099)
_TAGS = (0, 7, 1 << 40)
_YIELDS = 20
"""How often a ``move`` has to yield while it waits: it must not wait otherwise after the first yields."""
_PLANNED = "rank 0 fails, as the contract wants"


class BackendContract:
    """The tests; a class that inherits them names its backend. Nothing in them needs pytest."""

    backend: str
    """The name under which the backend is registered."""
    seconds: float = 10.0
    """How long a call may take."""

    def test_supports_answers_the_same_on_all_ranks(self) -> None:
        for size in _SIZES:
            _supported(self.backend, size)

    def test_supported_calls_give_what_numpy_gives(self) -> None:
        for size in _SIZES:
            cases = [
                replace(case, seed=seed, root=seed % size) for seed, case in enumerate(_supported(self.backend, size))
            ]
            self._run(_play_in_turn, size, cases[size % 2 :: 2])  # each of them with 2 ranks or more

    def test_every_length_and_root(self) -> None:
        for size in _SIZES:
            chosen = product(self._one_of_each(size), _LENGTHS, range(size))
            cases = [replace(case, count=count, root=root, seed=root) for case, count, root in chosen]
            self._run(_play_in_turn, size, [case for case in cases if case.has_root or case.root == 0])

    def test_blocks_of_unequal_sizes(self) -> None:
        for size in _SIZES:
            uneven = [case for case in self._one_of_each(size) if OPERATIONS[case.op]["sizes"] != "equal"]
            chosen = product(uneven, (0, 2), range(4))
            cases = [replace(case, count=count, seed=seed, is_uneven=True) for case, count, seed in chosen]
            self._run(_play_in_turn, size, cases)

    def test_messages_go_by_tag_and_beside_other_calls(self) -> None:
        for size in _SIZES[1:]:
            cases = {case.op: case for case in self._one_of_each(size)}
            if message := cases.pop("send", None):
                self._run(_exchange, size, message, [replace(case, seed=1) for case in cases.values()])

    def test_coalesced_calls(self) -> None:
        for size in _SIZES:
            for case in self._one_of_each(size):
                if case.op == "all_reduce":
                    self._run(_coalesce, size, case)

    def test_groups_do_not_meet(self) -> None:
        for size in _SIZES[1:]:
            self._run(_play_in_two_groups, size, [replace(case, seed=1) for case in self._one_of_each(size)])

    def test_what_is_refused_leaves_the_group_usable(self) -> None:
        for size in _SIZES:
            supported = {(case.op, case.dtype, case.reduce_op) for case in _supported(self.backend, size)}
            collectives = [call for call in _calls() if not OPERATIONS[call[0]]["is_message"]]
            for call in [call for call in collectives if call not in supported][:1]:
                self._run(_be_refused, size, Case(*call, size), self._one_of_each(size))

    def test_move_yields_while_it_waits(self) -> None:
        for size in _SIZES[1:]:
            self._run(_begin_late, size, self._late_cases(size), self.seconds / 2)

    def test_an_error_of_move_reaches_the_other_ranks(self) -> None:
        self._fail("error")

    def test_an_abort_reaches_the_other_ranks(self) -> None:
        self._fail("abort")

    def test_close_is_called_once(self) -> None:
        for size in _SIZES:
            for closes in self._run(lambda: _watch_close(current()), size):
                _require_one_close(closes, failed=False)

    def _fail(self, fault: str) -> None:
        for size in _SIZES[1:]:
            for case, waiting in self._late_cases(size)[:1]:
                ends = self._run(_fail, size, case, waiting, self.seconds / 2, fault)
                for closes in [ends[rank] for rank in (0, *waiting)]:  # the others may have left before
                    _require_one_close(closes, failed=True)

    def _one_of_each(self, size: int) -> list[Case]:
        """Return a case for each supported operation: a sum of float32 where that is supported."""
        cases = sorted(
            _supported(self.backend, size), key=lambda case: (case.dtype == "float32", case.reduce_op == "SUM")
        )
        return list({case.op: case for case in cases}.values())

    def _late_cases(self, size: int) -> list[tuple[Case, Waiting]]:
        """Return an asynchronous case for each supported operation in which ranks need elements of rank 0."""
        found: list[tuple[Case, Waiting]] = []
        for case in self._one_of_each(size):
            late = replace(case, seed=1, root=0 if OPERATIONS[case.op]["givers"] == "root" else size - 1)
            waiting = {rank: threading.Event() for rank in range(1, size) if 0 in late.sources(rank)}
            found += [(late, waiting)] if waiting else []
        return found

    def _run(self, function: Callable[..., T], size: int, *arguments: Any) -> list[T]:
        """Call ``function(*arguments)`` on the ranks of a world. Raises AssertionError with the first failure."""

        def on_rank() -> T:
            current().set_timeout(self.seconds)
            return function(*arguments)

        try:
            return run_ranks(on_rank, size, timeout=6 * self.seconds, backend=self.backend)
        except RanksFailed as failed:
            raise AssertionError(f"backend {self.backend!r}: {next(iter(failed.errors.values()))}") from failed


@cache
def _calls() -> list[tuple[str, str, str]]:
    """Return (operation, dtype, reduce op) of all calls with dtypes that NumPy has here."""
    has_ml_dtypes = importlib.util.find_spec("ml_dtypes") is not None
    rows = [
        row for row in capabilities("gloo", "cpu") if row.is_supported and row.operation in OPERATIONS and row.dtype
    ]
    known = [row for row in rows if has_ml_dtypes or not row.dtype.startswith(("bfloat16", "float8"))]
    return [(row.operation, row.dtype, row.reduce_op) for row in known]


def _backend(group: ProcessGroup) -> Any:
    return group.backends["cpu"]


@cache
def _supported(backend: str, size: int) -> Sequence[Case]:
    """Return a case for each supported call. Raises AssertionError unless the ranks have the same ones."""
    answers = run_ranks(_ask, size, backend=backend)
    if not answers[0]:
        raise AssertionError(f"backend {backend!r} supports no call on rank 0 of {size}")
    for rank, answer in enumerate(answers):
        for call in set(answers[0]) ^ set(answer):
            raise AssertionError(f"{Case(*call, size)}: supports answers otherwise on rank {rank} than on rank 0")
    sent, received = ({dtype for op, dtype, _ in answers[0] if op == message} for message in ("send", "recv"))
    for dtype in sent ^ received:
        raise AssertionError(f"messages of {dtype} on {size} ranks: supports answers otherwise for send than for recv")
    without = ("recv",) if size > 1 else ("send", "recv")
    return [Case(*call, size) for call in answers[0] if call[0] not in without]


def _ask() -> list[tuple[str, str, str]]:
    supports = _backend(current()).supports
    return [(op, dtype, by) for op, dtype, by in _calls() if supports(op, dtype, by and combining(by))]


def _play_in_turn(cases: Sequence[Case]) -> None:
    for case in cases:
        play(Part(case, current()))


def _exchange(case: Case, beside: Sequence[Case]) -> None:
    """Send a message of each tag to every other rank, beside other calls; receive them in another order."""
    group = current()
    messages = [replace(case, distance=distance, seed=tag) for tag in _TAGS for distance in range(1, case.size)]
    order = messages[:: -1 if group.rank() % 2 else 1]
    play(*(Part(one, group) for one in [*beside, *order]))
    play(*(Part(replace(case, count=count), group) for count in (3, 2)))  # of one tag, in order


def _coalesce(case: Case) -> None:
    parts = [Part(replace(case, count=count), current()) for count in (1, 0, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for part in parts:
            part.start()
    manager.wait()
    for part in parts:
        part.compare()


def _play_in_two_groups(cases: Sequence[Case]) -> None:
    """Make each call in both groups at once, and end the second group before the first."""
    world = current()
    members = [0, world.size() - 1]
    group = dist.new_group(members)
    is_member = world.rank() in members
    for case in cases:
        inner = replace(case, size=2, root=case.root % 2, seed=3)
        play(Part(case, world), *([Part(inner, group)] if is_member else []))
    if is_member:
        closes = _watch_close(group)
        dist.destroy_process_group(group)
        _require_one_close(closes, failed=False)
    _play_in_turn(cases)


def _be_refused(unsupported: Case, cases: Sequence[Case]) -> None:
    part = Part(unsupported, current())
    try:
        part.start()
        part.wait()
    except DistBackendError:
        _play_in_turn(cases)
    else:
        raise part.error("the backend does not support this call, and it was not refused")


def _begin_late(cases: Sequence[tuple[Case, Waiting]], seconds: float) -> None:
    """Let rank 0 begin each call when the ranks that need its elements have waited for it."""
    group = current()
    move = _backend(group).move
    for case, waiting in cases:
        _replace(group, "move", _staged(move, group.rank(), waiting, seconds))
        play(part := Part(case, group))
        if group.rank() in waiting and not waiting[group.rank()].is_set():
            raise part.error("move must yield as long as it waits for another rank, and it did not wait so for rank 0")


def _fail(case: Case, waiting: Waiting, seconds: float, fault: str) -> list[object]:
    """Let rank 0 fail, by an error of its ``move`` or by ``abort``, while others wait for it; return the closes."""
    group, error = current(), ""
    closes, part = _watch_close(group), Part(case, group)
    _replace(group, "move", _staged(_backend(group).move, group.rank(), waiting, seconds, fault))
    try:
        part.start()
        if group.rank() == 0 and fault == "abort":
            for event in waiting.values():
                event.wait(seconds)
            group.abort()
        part.wait()
    except DistError as raised:
        error = f"{type(raised).__name__}: {raised}"
    is_named = error.startswith("PeerFailed") and "rank 0" in error and (fault == "abort" or _PLANNED in error)
    if group.rank() in waiting and not is_named:
        raise part.error(f"expected PeerFailed, which names rank 0, where that has failed, got {error or 'no error'}")
    return closes


def _staged(move: Move, rank: int, waiting: Waiting, seconds: float, fault: str = "") -> Move:
    """Return a ``move`` that begins on rank 0 when others have waited for it, or after some seconds, if at all."""

    def on_rank_0(call: Call) -> Iterator[Any]:
        deadline = time.monotonic() + seconds
        while fault == "abort" or (
            not all(event.is_set() for event in waiting.values()) and time.monotonic() < deadline
        ):
            yield None
        if fault:
            raise RuntimeError(_PLANNED)
        yield from move(call)

    def on_others(call: Call) -> Iterator[Any]:
        for number, awaited in enumerate(move(call), start=1):
            if number == _YIELDS and rank in waiting:
                waiting[rank].set()
            yield awaited

    return on_others if rank else on_rank_0


def _watch_close(group: ProcessGroup) -> list[object]:
    """Return a list that gets what the backend's ``close`` is called with, and what it raises."""
    close, closes = _backend(group).close, list[object]()

    def watched(failed: bool) -> None:
        closes.append(failed)
        try:
            close(failed)
        except Exception as error:
            closes.append(f"{type(error).__name__}: {error}")
            raise

    _replace(group, "close", watched)
    return closes


def _require_one_close(closes: Sequence[object], failed: bool) -> None:
    if closes != [failed]:
        raise AssertionError(f"close must be called once, with {failed}, and raise nothing; calls and errors: {closes}")


def _replace(group: ProcessGroup, name: str, function: Callable[..., Any]) -> None:
    setattr(_backend(group), name, function)
