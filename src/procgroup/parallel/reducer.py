"""Averages gradients while a backward still produces others.

A *round* is one backward whose gradients are averaged. In the first round a hook on each parameter notices the order in
which gradients *arrive*, which all ranks take from rank 0. From then on the hooks are on *probes* only: the parameters
that came last in their buckets. When all gradients of a bucket have arrived, it is packed and *issued*, in the same
order of buckets on every rank, whatever the order of arrival there. Between ranks that share memory, little is left
for the end: to wake the thread that averages beside the backward would take longer than to average it.

At the end of the backward the other buckets are issued, with zeros for what did not arrive, and the ranks *agree*:
parameters to whose gradient any rank has added get the average, the others stay as they are. So parameters that some
ranks do not use need no flag.

A gradient may come again after its bucket was packed, for instance from a module that is checkpointed and used twice.
Packing takes the gradients out of the parameters, so what comes *late* is apart; it is averaged at the end and added.
From then on its bucket waits for the end of the backward.

A backward that fails on this rank leaves the others waiting. The rank tells them at its next forward: it issues what is
left of the round and says in the agreement that it failed; so all drop the round, and can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from operator import attrgetter
from typing import Any

from procgroup.arrays.untraced import untraced
from procgroup.errors import GroupBroken
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.agreement import Agreement
from procgroup.parallel.averaged_gradients import AveragedGradients
from procgroup.parallel.backward_end import BackwardEnd, is_inside_backward
from procgroup.parallel.backward_optimizers import Steps
from procgroup.parallel.buckets import Bucket
from procgroup.parallel.division import Division
from procgroup.parallel.grad_bucket import Hook
from procgroup.parallel.gradient_hooks import GradientHooks
from procgroup.parallel.hook_call import HookCall
from procgroup.parallel.mixed_precision import NarrowCopies
from procgroup.parallel.place import AT_END, Place
from procgroup.parallel.static_graph import StaticGraph
from procgroup.parallel.training_errors import BackwardFailed
from procgroup.types import AnyReduceOp, ReduceOp

EARLY_BYTES = 4 << 20
"""How much is to be ready for ranks that share memory to average it before the end of the backward."""


@untraced
class Reducer:
    """The gradients of some parameters, and the hooks that notice them. ``remove_hooks`` ends it."""

    def __init__(
        self,
        group: ProcessGroup,
        named_parameters: Sequence[tuple[str, Any]],
        *,
        limits: Sequence[int],
        sparse: frozenset[str] = frozenset(),
        delayed: frozenset[str] = frozenset(),
        static_graph: bool = False,
        leaves_out_unused: bool = False,
        optimizers: Sequence[Steps] = (),
        gradient_dtype: Callable[[Any], Any] = lambda parameter: parameter.dtype,
    ) -> None:
        """``delayed`` parameters are averaged after all others. ``leaves_out_unused``: those that no rank uses in the
        first round have no place in a bucket. ``optimizers`` step when all is averaged. ``gradient_dtype`` tells in
        which dtype a gradient is averaged."""
        self._group = group
        self._places = [
            Place(index, name, parameter, gradient_dtype(parameter), is_sparse=name in sparse)
            for index, (name, parameter) in enumerate(named_parameters)
        ]
        self.parameter_ids: frozenset[int] = frozenset(id(place.parameter) for place in self._places)
        self._division = Division(group, self._places, limits, delayed, leaves_out_unused)
        self._averages = AveragedGradients(group, self._places, self._division)
        self._agreement, self._end = Agreement(group, len(self._places)), BackwardEnd()
        self._hook: HookCall | None = None
        self._optimizers = optimizers
        self._static = StaticGraph(self._places) if static_graph else None
        self.op: AnyReduceOp = ReduceOp.AVG
        # Called before the first bucket of a round is issued.
        self.announce: Callable[[], None] | None = None
        # Whether a backward that no output has announced is a round.
        self.expects_round = False
        self._is_round = False
        # From the beginning of a round to its end, also where the backward has failed meanwhile.
        self._is_open = self._is_announced = False
        self._next = 0
        self._watches_all = True
        self._hooks = GradientHooks()
        for place in self._places:
            self._hooks.add(place.parameter, partial(self._on_gradient, place))

    def set_hook(self, state: Any, hook: Hook) -> None:
        """Have a communication hook average the buckets from now on."""
        self._hook = HookCall(state, hook)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets as they are now."""
        return self._division.buckets

    def set_static_graph(self) -> None:
        """Expect the same graph in every backward. Raises RuntimeError after the first one."""
        if self._division.is_learnt:
            raise RuntimeError(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed."
            )
        self._static = StaticGraph(self._places)

    def remove_hooks(self) -> None:
        """Leave the parameters alone from now on."""
        self._hooks.remove()

    def prepare(self) -> None:
        """Do, before a forward, what an earlier round has left to do."""
        if not self._end.is_awaited() and not is_inside_backward():
            self._recover()
            self._renew()

    def begin(self, is_round: bool, copies: NarrowCopies | None = None) -> None:
        """Begin a backward, which is a round or none. Called inside of it, before any gradient arrives.

        ``copies`` are what the forward has computed with in the parameters' places.
        """
        if self._end.is_awaited():
            return
        self._recover()
        self._renew()
        is_frozen = not any(place.parameter.requires_grad for place in self._places)
        self._is_round = self._is_open = (
            is_round and not is_frozen and self._end.accumulates_gradients(self.parameter_ids)
        )
        self._end.ask(self._on_end)
        if copies is not None:
            copies.put_in()
            self._end.clean_up(copies.take_out)

    def answer(self) -> None:
        """Take part, with zeros, in a round of the ranks that still have inputs."""
        self.prepare()
        for place in self._places:
            place.parameter.grad = None
        self._is_announced = True
        with suppress(BackwardFailed):
            self._finish(is_answer=True)
        for place in self._places:
            place.parameter.grad = None

    def _renew(self) -> None:
        """Divide the gradients anew, once the order is known in which they arrive."""
        if self._division.renew() and self._static is None:
            self._watches_all = False
            self._watch_probes()

    def _watch_probes(self) -> None:
        self._hooks.remove()
        helps = self._is_enough(self._division.buckets)
        for bucket in self._division.buckets:
            has_probe = helps and not any(place.awaited == AT_END for place in bucket.places)
            for place in bucket.places:
                is_probe = has_probe and place is bucket.places[-1]
                self._hooks.add(place.parameter, partial(self._on_probe, bucket) if is_probe else self._on_any)
        for place in self._division.outside:
            self._hooks.add(place.parameter, self._on_any)

    def _on_any(self, parameter: Any) -> None:
        """Notice a backward that no output has announced."""
        if not self._end.is_awaited():
            self.begin(self.expects_round)

    def _on_gradient(self, place: Place, parameter: Any) -> None:
        self._on_any(parameter)
        if not self._is_round:
            return
        self._division.note(place)
        place.arrivals += 1
        if place.arrivals == place.awaited and place.bucket is not None:
            place.bucket.missing -= 1
            self._issue_complete(place.bucket)

    def _on_probe(self, bucket: Bucket, parameter: Any) -> None:
        self._on_any(parameter)
        if self._is_round and not bucket.is_packed and bucket.is_complete():
            bucket.missing = 0
            self._issue_complete(bucket)

    def _issue_complete(self, bucket: Bucket) -> None:
        """Pack a bucket in which nothing is missing any more; issue what is ready, when that is enough."""
        if bucket.missing == 0 and not bucket.is_packed:
            bucket.pack(self._agreement.flags, is_early=True)
        ready = list(takewhile(attrgetter("is_packed"), self._division.buckets[self._next :]))
        if self._is_enough(ready):
            for each in ready:
                self._issue(each, waits=False)

    def _is_enough(self, buckets: Sequence[Bucket]) -> bool:
        return self._group.transport != "shared memory" or sum(bucket.nbytes for bucket in buckets) >= EARLY_BYTES

    def _issue(self, bucket: Bucket, waits: bool) -> None:
        self._open()
        self._next += 1
        if self._hook is not None:
            bucket.pending = self._hook.begin(bucket, is_last=bucket.index == len(self._division.buckets) - 1)
            return
        try:
            with bucket.named_in_errors():
                bucket.pending = self._group.all_reduce(bucket.buffer, self.op, not waits)
        except GroupBroken:
            self._await_pending()  # one of these has ended the group, and says more
            raise

    def _open(self) -> None:
        if self.announce is not None and not self._is_announced:
            self._is_announced = True
            self.announce()

    def _on_end(self) -> None:
        if self._is_round:
            self._finish()
            for optimizer in self._optimizers:
                optimizer.step()

    def _recover(self) -> None:
        """Finish, on behalf of the other ranks, a round whose backward failed on this one."""
        if self._is_open:
            for place in self._places:
                if place.is_new():
                    place.parameter.grad = None
            self._agreement.mark_failed()
            self._finish()

    def _finish(self, is_answer: bool = False) -> None:
        self._open()
        self._pack_all()  # where this raises, the round is as after a backward that failed
        try:
            for bucket in self._division.buckets[self._next :]:
                self._issue(bucket, waits=True)
            self._await_pending()
            if self._static is not None and not is_answer:
                self._static.compare(self._agreement)
            self._agreement.settle()
            self._conclude()
        finally:
            self._is_open = self._is_announced = False
            self._next = 0
            for bucket in self._division.buckets:
                bucket.reset()
            if self._watches_all:
                for place in self._places:
                    place.arrivals = 0

    def _pack_all(self) -> None:
        flags = self._agreement.flags
        for bucket in self._division.buckets:
            if not bucket.is_packed:
                bucket.pack(flags, is_early=False)
            elif bucket.is_early:
                for place in bucket.places:
                    if place.new_gradient() is not None:
                        self._agreement.mark_late(place.index)
        for place in self._division.outside:
            if place.new_gradient() is not None:
                flags[place.index] = 1
                if not place.is_sparse:
                    self._agreement.mark_late(place.index)

    def _await_pending(self) -> None:
        for bucket in self._division.buckets:
            if bucket.pending is None:
                continue
            with bucket.named_in_errors():
                if self._hook is None:
                    bucket.pending.wait()
                else:
                    self._hook.finish(bucket)

    def _conclude(self) -> None:
        agreement = self._agreement
        if failed := agreement.failed():
            self._averages.drop(agreement)
            if self._group.rank() not in failed:
                raise BackwardFailed(ranks=failed)
            return
        late = agreement.late()
        for index in late:
            self._averages.add_late(self._places[index], self.op)
        if late and not self._watches_all:
            self._watch_probes()
        self._averages.give(agreement, self.op)
        self._division.learn(agreement)
        if self._static is not None:
            self._static.learn()
        if self._static is not None and agreement.is_changed():
            raise self._static.error(self._group)
