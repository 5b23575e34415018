"""The reducer: averages gradients over the ranks while the backward computes others.

A *round* is one backward whose gradients are averaged. In the first round a hook on each parameter records the order in
which gradients *arrive*; all ranks then use the order of rank 0. In later rounds there are hooks on *probes* only: the
parameters whose gradients arrive last in their buckets. When all gradients of a bucket have arrived, the bucket is
packed and *issued* (its collective starts), in the same order of buckets on every rank, whatever the order of arrival.
Ranks that share memory issue small buckets at the end of the backward: averaging them takes less time than waking the
thread that would do it during the backward.

At the end of the backward the remaining buckets are issued, with zeros for gradients that did not arrive. Then the
ranks exchange marks: a parameter that any rank has used gets the average, the others keep their gradients. Parameters
that some ranks do not use therefore need no option.

A gradient may arrive again after its bucket was packed, for instance in a checkpointed module that is used twice.
Packing removes the gradients from the parameters, so a *late* gradient is separate: it is averaged at the end and
added. Afterwards its bucket is packed at the end of the backward.

With *exchanges* a round that loses a rank begins again among the others, with the gradients that the buckets have kept.

On GPUs the calls of a round are queued on streams, and no host waits for a GPU: marks in host memory show which
gradients are packed, averaged and assigned. Autograd has a thread for each GPU, so the hooks run under a lock.

When a backward fails on one rank, the others wait. At its next forward that rank issues the rest of the round with a
mark that it failed; all ranks then drop the round's gradients and continue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from operator import attrgetter
from typing import Any

from procgroup.arrays.untraced import untraced
from procgroup.errors import BackwardFailed, GraphChanged, GroupBroken
from procgroup.parallel.communication_hooks.interface import GradBucket, Hook, HookCall
from procgroup.parallel.ddp.backward import (
    RunningBackward,
    accumulates_gradients,
    add_gradient_hook,
    is_inside_backward,
)
from procgroup.parallel.ddp.bucket_assignment import BucketAssignment, BucketOrder
from procgroup.parallel.ddp.buckets import AT_END, Bucket, ParameterSlot
from procgroup.parallel.ddp.captured_steps import advising_hooks, is_capturing, refuse_remainder, require_capturable
from procgroup.parallel.ddp.devices import DeviceGroups
from procgroup.parallel.ddp.lost_ranks import RANK_WAS_LOST, Exchanges
from procgroup.parallel.ddp.mixed_precision import NarrowCopies
from procgroup.parallel.ddp.model_checks import StaticGraph
from procgroup.parallel.ddp.round import Round
from procgroup.types import AnyReduceOp, ReduceOp

EARLY_BYTES = 4 << 20
"""Minimum bytes ready before ranks that share memory overlap communication with the backward."""


@untraced
class Reducer:
    """Averages the gradients of some parameters, from hooks on them, until ``remove_hooks``."""

    def __init__(
        self,
        groups: DeviceGroups,
        named_parameters: Sequence[tuple[str, Any]],
        *,
        limits: Sequence[int],
        sparse: frozenset[str] = frozenset(),
        delayed: frozenset[str] = frozenset(),
        static_graph: bool = False,
        leaves_out_unused: bool = False,
        after_round: Callable[[], None] = lambda: None,
        gradient_dtype: Callable[[Any], Any] = attrgetter("dtype"),
        exchanges: Exchanges | None = None,
    ) -> None:
        """``limits`` are the sizes of buckets in bytes. ``delayed`` parameters are averaged after all others.

        With ``leaves_out_unused``, parameters that no rank uses in the first round get no bucket. ``after_round`` is
        called when all gradients are averaged. ``gradient_dtype`` maps a parameter to the dtype of its average. With
        ``exchanges`` a round goes on without ranks that are lost.
        """
        self._groups = groups
        self._slots = [
            ParameterSlot(index, name, parameter, gradient_dtype(parameter), is_sparse=name in sparse)
            for index, (name, parameter) in enumerate(named_parameters)
        ]
        self.parameter_ids: frozenset[int] = frozenset(id(slot.parameter) for slot in self._slots)
        self._assignment = BucketAssignment(groups, self._slots, limits, delayed, leaves_out_unused)
        self._backward = RunningBackward()
        self._is_on_gpus = any(slot.device.type != "cpu" for slot in self._slots)
        self._running = threading.RLock()
        self._exchanges = exchanges
        self._hook: HookCall | None = None
        self._after_round = after_round
        self._static = StaticGraph(self._slots) if static_graph else None
        self.op: AnyReduceOp = ReduceOp.AVG
        # Called before the first bucket of a round is issued.
        self.announce: Callable[[], None] | None = None
        # Whether a backward without a hook on an output is a round.
        self.expects_round = False
        # From its beginning to its end, also after a failed backward; None in a backward that is not averaged.
        self._round: Round | None = None
        self._handles = [add_gradient_hook(slot.parameter, partial(self._on_gradient, slot)) for slot in self._slots]

    def set_hook(self, state: Any, hook: Hook) -> None:
        """Average the buckets with a communication hook from now on."""
        self._hook = HookCall(state, hook)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The current buckets."""
        return self._assignment.buckets

    @property
    def _watches_all(self) -> bool:
        """Whether each gradient has a hook that counts its arrivals: in the first round, and in a static graph."""
        return self._static is not None or self._assignment.order is not BucketOrder.SETTLED

    def set_static_graph(self) -> None:
        """Expect the same graph in every backward. Raises RuntimeError after the first one."""
        if self._assignment.order is not BucketOrder.ARRIVING:
            raise RuntimeError(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed."
            )
        self._static = StaticGraph(self._slots)

    def remove_hooks(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def prepare(self) -> None:
        """Complete an earlier round, before a forward."""
        if is_inside_backward():
            return
        if self._is_on_gpus:
            self._backward.await_dropped()
        if not self._backward.is_registered():
            self._prepare_round()

    def begin(self, is_round: bool, copies: NarrowCopies | None = None) -> None:
        """Begin a backward, within one of its hooks and before any gradient arrives.

        ``copies`` are the narrow parameters of the forward, with mixed precision.
        """
        with self._running:
            if self._backward.is_registered():
                return
            self._prepare_round()
            is_frozen = not any(slot.parameter.requires_grad for slot in self._slots)
            if is_round and not is_frozen and accumulates_gradients(self.parameter_ids):
                self._round = Round(self._slots, self._assignment)
                if self._exchanges is not None:
                    self._exchanges.has_begun_round = True
            self._backward.register(self._on_end, None if copies is None else copies.remove)
            if copies is not None:
                copies.install()

    def contribute_zeros(self) -> None:
        """Take part, with zeros, in a round of the ranks that still have inputs."""
        self.prepare()
        for slot in self._slots:
            slot.parameter.grad = None
        self._round = Round(self._slots, self._assignment, is_announced=True)
        with suppress(BackwardFailed):
            self._finish(self._round, has_backward=False)
        for slot in self._slots:
            slot.parameter.grad = None

    def _prepare_round(self) -> None:
        """Finish, for the other ranks, a round whose backward failed on this rank; then rebuild the buckets if due."""
        if self._is_on_gpus and is_capturing():
            require_capturable(
                is_settled=self._assignment.order is BucketOrder.SETTLED,
                has_sparse=any(slot.is_sparse for slot in self._slots),
                outlives_ranks=self._exchanges is not None,
            )
        if self._round is not None:
            for slot in self._slots:
                if slot.is_new():
                    slot.parameter.grad = None
            self._round.has_failed = True
            self._finish(self._round)
            if self._is_on_gpus and is_capturing():
                refuse_remainder()
        if self._assignment.rebuild() and self._static is None:
            self._watch_probes()

    def _watch_probes(self) -> None:
        self.remove_hooks()
        overlaps = self._is_enough(self.buckets)
        for bucket in self.buckets:
            has_probe = overlaps and not any(slot.awaited == AT_END for slot in bucket.slots)
            for slot in bucket.slots:
                is_probe = has_probe and slot is bucket.slots[-1]
                hook = partial(self._on_probe, bucket) if is_probe else self._on_any
                self._handles.append(add_gradient_hook(slot.parameter, hook))
        self._handles += [add_gradient_hook(slot.parameter, self._on_any) for slot in self._assignment.unbucketed]

    def _on_any(self, parameter: Any) -> None:
        """Begin a backward that has no hook on an output."""
        if not self._backward.is_registered():
            self.begin(self.expects_round)
        if self._is_on_gpus:
            self._backward.see_stream(parameter.device)

    def _on_gradient(self, slot: ParameterSlot, parameter: Any) -> None:
        self._on_any(parameter)
        if self._round is not None:
            with self._running:
                self._assignment.record_arrival(slot)
                bucket = self._assignment.bucket_of(slot)
                if slot.arrivals == slot.awaited and bucket is not None:
                    bucket.missing -= 1
                    self._issue_complete(self._round, bucket)

    def _on_probe(self, bucket: Bucket, parameter: Any) -> None:
        self._on_any(parameter)
        if self._round is not None and not bucket.is_packed and bucket.is_complete():
            with self._running:
                bucket.missing = 0
                self._issue_complete(self._round, bucket)

    def _issue_complete(self, current: Round, bucket: Bucket) -> None:
        """Pack a bucket without missing gradients; issue the ready buckets if they are large enough."""
        if bucket.missing == 0 and not bucket.is_packed:
            self._join_streams(bucket)
            bucket.pack(current.marks, is_early=True)
        ready = list(takewhile(attrgetter("is_packed"), self.buckets[current.issued :]))
        if current.early_error is not None or not self._is_enough(ready):
            return
        try:
            for each in ready:
                self._join_streams(each)
                self._issue(current, each, waits=False)
        except (GroupBroken, *RANK_WAS_LOST) as error:
            if self._exchanges is None:
                raise
            current.early_error = error  # the attempt at the end of the backward fails with it

    def _is_enough(self, buckets: Sequence[Bucket]) -> bool:
        if self._is_on_gpus or self._groups.group.transport != "shared memory":
            return True
        return sum(bucket.nbytes for bucket in buckets) >= EARLY_BYTES

    def _join_streams(self, bucket: Bucket) -> None:
        """Let the current stream have all gradients of a bucket, which may have arrived, or be packed, on others."""
        if self._is_on_gpus:
            self._backward.join_streams(bucket.device, (slot.parameter.grad for slot in bucket.slots))

    def _issue(self, current: Round, bucket: Bucket, waits: bool) -> None:
        self._announce_once(current)
        current.issued += 1
        if self._exchanges is not None:
            bucket.keep()
        if self._hook is not None:
            is_last = bucket.index == len(self.buckets) - 1
            with advising_hooks(bucket.device):
                bucket.pending = self._hook.begin(GradBucket(bucket.index, bucket.buffer, bucket.slots, is_last))
            return
        try:
            with bucket.annotate_errors():
                bucket.pending = self._groups.of(bucket.buffer).all_reduce(bucket.buffer, self.op, not waits)
        except GroupBroken:
            self._wait()  # the call that has broken the group raises an error with more details
            raise

    def _announce_once(self, current: Round) -> None:
        if self.announce is not None and not current.is_announced:
            current.is_announced = True
            self.announce()

    def _on_end(self) -> None:
        if self._round is not None:
            self._finish(self._round)
            self._after_round()

    def _finish(self, current: Round, has_backward: bool = True) -> None:
        self._announce_once(current)
        current.pack()  # an error in it leaves the round open, as a failed backward does
        if self._static is not None and has_backward:
            self._static.compare(current)
        average = partial(self._average, current)
        try:
            if self._exchanges is None:
                graph_error = average()
            else:
                graph_error = self._exchanges.run(average, partial(self._rewind, current))
                self._exchanges.end_round()
            self._assign_averages(current)
            if graph_error is not None:
                raise graph_error
        finally:
            self._round = None
            for bucket in self.buckets:
                bucket.reset()
            if self._watches_all:
                for slot in self._slots:
                    slot.arrivals = 0

    def _average(self, current: Round) -> GraphChanged | None:
        """Make all calls of the round that are not made yet; change no gradient of a parameter."""
        if current.early_error is not None:
            raise current.early_error
        for bucket in self.buckets[current.issued :]:
            self._issue(current, bucket, waits=True)
        self._wait()
        current.synchronize(self._groups.group)
        if current.failed():
            return None
        current.collect(self._groups, self.op)
        self._assignment.receive_order()
        if self._static is None or not current.is_changed():
            return None
        return self._static.error(self._groups.group)

    def _rewind(self, current: Round) -> None:
        """Begin the round again."""
        current.early_error = None
        for bucket in self.buckets[: current.issued]:
            bucket.restore()
        current.issued = 0

    def _wait(self) -> None:
        for bucket in self.buckets:
            if bucket.pending is None:
                continue
            with bucket.annotate_errors():
                if self._hook is None:
                    bucket.pending.wait()
                    continue
                with advising_hooks(bucket.device):
                    bucket.set_average(self._hook.finish(bucket.pending, bucket.buffer.numel(), bucket))

    def _assign_averages(self, current: Round) -> None:
        if failed := current.failed():
            current.drop()
            if not current.has_failed:
                raise BackwardFailed(ranks=failed)
            return
        current.assign()
        if not self._watches_all and current.late():
            self._watch_probes()
        self._assignment.accept_order(current.is_used)
        if self._static is not None:
            self._static.learn()
