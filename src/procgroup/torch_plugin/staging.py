"""Run calls on the tensors of a device, such as a GPU, through host memory.

The *caller's stream* is the current one of the device where a call is made. Two *side streams* of the group copy: *in*,
from the device to the host, and *out*. *Host tensors* stand for the device's in procgroup's call::

    caller's stream   .. kernels .. ready                                     after wait(): kernels ..
    in                                \\ copies in .. copied                  /
    procgroup                                              \\ the call       /
    out                                                             \\ copies out .. back

``ready``, ``copied`` and ``back`` are events. Streams wait for them; threads wait for ``copied`` alone. Ranks match
calls by their order, so the call is deferred until then: what the group is asked meanwhile is issued behind it.
``wait()`` returns when procgroup's call has completed, as torch's Gloo does; the results can be used on the stream that
is current then.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from procgroup import types
from procgroup.arrays.untraced import untraced
from procgroup.errors import ArgumentError, CollectiveMismatch, ForkedProcessError, GroupBroken, WaitTimeout
from procgroup.groups.future import Future
from procgroup.groups.group import ProcessGroup
from procgroup.torch_plugin import callbacks
from procgroup.torch_plugin.arguments import limit_of, listed
from procgroup.torch_plugin.host_tensors import Part, parts_of
from procgroup.torch_plugin.side_streams import Pairs, SideStreams, wait_on_host
from procgroup.torch_plugin.work import TorchWork, completed_work

_TITLES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "alltoall": "all_to_all",
    "recv_anysource": "recv",
}
_side_streams: weakref.WeakKeyDictionary[ProcessGroup, dict[Any, SideStreams]] = weakref.WeakKeyDictionary()


class StagedCall:
    """What a torch work stands for: one part, or several. It ends by its deadline, or by that of procgroup's call."""

    def __init__(self, group: ProcessGroup, streams: SideStreams, op: str, seconds: float) -> None:
        self.streams = streams
        self._group = group
        self._deferring = group.deferring()
        self._op = op
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._end = Future()
        self._end.set_running_or_notify_cancel()
        self._works: list[TorchWork] = []
        self._back: Any = None
        self._ready = streams.event()
        streams.into.wait_event(self._ready)

    def start(self, parts: list[Part], last: Pairs, call: Callable[..., TorchWork], *, at_once: bool) -> None:
        """Copy in, and make the calls in their place. ``last`` is copied when all parts are out."""
        self._call, self._last, self._parts, self._left = call, last, len(parts), len(parts)
        for part in parts:
            if part.reads:
                self.streams.copy(part.reads, self.streams.into)
                part.copied = self.streams.event(self.streams.into)
        self._deferring.defer(lambda: self._issue(parts), self._seconds, at_once=at_once)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for procgroup's call, and let the current stream wait for what is copied out."""
        if os.getpid() != self._process:
            raise ForkedProcessError(self._what)
        limit = None if timeout is None else types.seconds(timeout) or None
        try:
            self._end.result(limit)
        except concurrent.futures.TimeoutError:
            if self._end.done():
                raise
            raise WaitTimeout(op=self._op, where=f"group {self._group.group_name}", seconds=limit or 0.0) from None
        if self._back is not None:
            self.streams.let_current_wait(self._back)
        return True

    def until_back(self) -> None:
        """Wait until the results are on the device, after a successful call."""
        if self._back is not None:
            deadline = time.monotonic() + self._seconds
            wait_on_host(self._back, deadline, self._what, lambda: self._deferring.is_aborted)

    def is_completed(self) -> bool:
        return self._end.done()

    def is_success(self) -> bool:
        return self._end.done() and self._end.exception() is None

    def exception(self) -> BaseException | None:
        return self._end.exception() if self._end.done() else None

    def result(self) -> list[Any]:
        if not self._end.done():
            raise RuntimeError(f"{self._what} has not completed; call wait() before result().")
        self.wait()
        return []

    def source_rank(self) -> int:
        self.result()
        return self._works[0].source_rank()

    def get_future(self) -> Future:
        return self._end

    @property
    def _what(self) -> str:
        return f"{self._op} on group {self._group.group_name}"

    def _issue(self, parts: list[Part]) -> None:
        try:
            for part in parts:
                self._until_copied(part)
                work = self._call(*part.arguments)
                self._works.append(work)
                work.on_completion(functools.partial(self._copy_out, part, work))
        except BaseException as error:
            self._fail(self._cause_of(error))

    def _cause_of(self, error: BaseException) -> BaseException:
        """Return ``error``; for a GroupBroken the error of the earlier chunk that broke the group."""
        if isinstance(error, GroupBroken):
            for work in self._works:
                try:
                    work.wait()
                except BaseException as cause:
                    return cause
        return error

    def _until_copied(self, part: Part) -> None:
        """Wait for the copies. Where they fail the other ranks cannot have this call: the group ends."""
        if part.copied is None:
            return
        try:
            is_copied = wait_on_host(part.copied, self._deadline, self._what, lambda: self._deferring.is_aborted)
        except BaseException:
            self._group.abort()
            raise
        if not is_copied:
            group = self._group
            raise GroupBroken(
                reason="aborted",
                op=self._op,
                sequence=0,
                group=group.group_name,
                rank=group.rank(),
                size=group.size(),
                members=group.members,
            )

    def _copy_out(self, part: Part, work: TorchWork) -> None:
        """Go on after procgroup's call of a part. The thread that completes calls does this, so nothing here waits."""
        try:
            error = work.exception()
            if error is not None:
                raise self._first_of(error)
            with self._lock:
                self._left -= 1
                pairs = part.writes + (self._last if self._left == 0 else [])
                if pairs and not self._end.done():
                    self.streams.out.wait_event(self._ready)
                    self.streams.copy(pairs, self.streams.out)
                    self._back = self.streams.event(self.streams.out)
                if self._left == 0 and not self._end.done():
                    self._end.set_result([])
        except BaseException as error:
            self._fail(error)

    def _first_of(self, error: BaseException) -> BaseException:
        """Return the error of the earliest failed chunk; completions may arrive out of order."""
        errors = [work.exception() for work in self._works if work.is_completed()]
        return next((each for each in errors if each is not None), error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._end.done():
                return
            if isinstance(error, CollectiveMismatch) and self._parts > 1:
                error.args = (f"{error} Large tensors on a device are sent in chunks; these are the sizes of one.",)
            self._end.set_exception(error)


@untraced
class StagedWork(TorchWork):
    """A staged call of the plug-in. What stock DDP waits for is its future, which knows the device's streams."""

    _call: StagedCall

    def _make_future(self) -> Any:
        call, streams = self._call, self._call.streams
        here = torch.accelerator.current_accelerator()
        knows_streams = here is not None and here.type == streams.device.type
        end = torch.futures.Future(devices=[streams.device] if knows_streams else None)

        def outcome(end: Any) -> Any:
            error = call.exception()
            if error is not None:
                raise error
            if not knows_streams:
                call.until_back()
            return end.value()

        def complete() -> None:
            with streams.using(streams.out):  # what the future lets later streams wait for
                end.set_result(self._outputs)

        future = end.then(outcome)
        call.get_future().add_done_callback(lambda _: callbacks.run(complete))
        return future


@untraced
class StagedCalls:
    """The calls of torch on ``calls``, a group of the plug-in, made of tensors on a device."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._stage, name)

    def _stage(self, name: str, *arguments: Any) -> TorchWork:
        device = _only_device(arguments)
        group = self._calls.group
        call = getattr(type(self._calls), name).__wrapped__  # the profiler has seen this one already
        if name == "allreduce" and arguments[0][0].layout is not torch.strided:
            return _at_once(arguments[0][0], lambda host: call(self._calls, [host], arguments[1]))
        given = arguments[-1]
        own = _asynchronous(given) if hasattr(given, "asyncOp") else None
        is_blocking = own is not None and not given.asyncOp
        limit = None if own is None else limit_of(own)
        streams = _streams(group, device)
        staged = StagedCall(group, streams, _TITLES.get(name, name), group.seconds_of(limit))
        is_root = getattr(own, "rootRank", None) == group.rank()
        later = [own if argument is given and own is not None else argument for argument in arguments]
        parts, last = parts_of(name, later, streams, is_root=is_root)
        staged.start(parts, last, functools.partial(call, self._calls), at_once=is_blocking)
        work = StagedWork(staged, listed(arguments[0]))
        if is_blocking:
            work.wait()
        return work


def _streams(group: ProcessGroup, device: Any) -> SideStreams:
    of_group = _side_streams.setdefault(group, {})
    if device not in of_group:
        of_group[device] = SideStreams(device)
    return of_group[device]


def _tensors(arguments: Any) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _only_device(arguments: Any) -> Any:
    """Return the device of all tensors. Raises ArgumentError where they are on several: nothing was moved."""
    devices = list(dict.fromkeys(tensor.device for tensor in _tensors(arguments)))
    if len(devices) > 1:
        names = ", ".join(map(str, devices))
        raise ArgumentError(f"the tensors of one call are on several devices: {names}. Move them to one of these.")
    return devices[0]


def _asynchronous(given: Any) -> Any:
    """Return options of its own for a call that is made later, on host tensors."""
    own = type(given)()
    for name in ("reduceOp", "rootRank", "timeout"):
        if hasattr(given, name):
            setattr(own, name, getattr(given, name))
    own.asyncOp = True
    return own


def _at_once(tensor: Any, call: Callable[[Any], Any]) -> TorchWork:
    """Make a call on a sparse tensor. It blocks, as on CPU tensors: how much there is to move is not known before."""
    host = tensor.cpu()
    call(host)
    tensor.copy_(host)
    return completed_work([tensor])
