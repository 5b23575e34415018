"""Averages gradients while a backward still produces others.

A *round* is one backward whose gradients are averaged. Each gradient *arrives* at its place in a bucket; a bucket in
which none is missing is *issued*, in the same order of buckets on every rank, whatever the order in which gradients
arrive there. At the end of the backward the other buckets are issued, with zeros for what did not arrive, and the ranks
*agree*: parameters that any rank has used get the average, those that none has used stay as they are. So parameters
that some ranks do not use need no flag.

A gradient may come again after its bucket was issued, for instance from a module that is checkpointed and used twice.
Issuing takes the gradients out of the parameters, so what comes *late* is apart; it is averaged at the end and added.
From then on its bucket waits for the end of the backward.

A backward that fails on this rank leaves the others waiting. The rank tells them at its next forward: it issues what is
left of the round and says in the agreement that it failed; so all drop the round, and can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from procgroup.api.objects import all_gather_object
from procgroup.errors import DistError
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.agreement import Agreement
from procgroup.parallel.bucket_plan import Piece, plan_buckets
from procgroup.parallel.buckets import AT_END, Bucket, GradientMemory, Place, make_buckets
from procgroup.parallel.grad_bucket import GradBucket
from procgroup.parallel.pytorch import torch
from procgroup.parallel.rounds import BackwardEnd, is_inside_backward
from procgroup.parallel.sparse_gradients import average_sparse
from procgroup.parallel.training_errors import BackwardFailed, GraphChanged
from procgroup.types import AnyReduceOp, ReduceOp

SINGLE_BYTES = 1 << 20
"""From this size on a gradient is averaged where autograd has put it: see ``buckets``."""

Hook = Callable[[Any, GradBucket], Any]


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
        gradient_dtype: Callable[[Any], Any] = lambda parameter: parameter.dtype,
    ) -> None:
        """``delayed`` parameters are averaged after all others. ``leaves_out_unused``: those that no rank uses in the
        first round have no place in a bucket. ``gradient_dtype`` tells in which dtype a gradient is averaged."""
        self._group = group
        self._limits = limits
        self._places = [
            Place(index, name, parameter, gradient_dtype(parameter))
            for index, (name, parameter) in enumerate(named_parameters)
        ]
        self._sparse = [place for place in self._places if place.name in sparse]
        self._delayed = frozenset(place.index for place in self._places if place.name in delayed)
        self._leaves_out_unused = leaves_out_unused
        self._left_out: list[Place] = []
        self._agreement = Agreement(group, len(self._places))
        self._end = BackwardEnd()
        self._memory: GradientMemory | None = None
        self._hook: tuple[Any, Hook] | None = None
        self._static_uses: list[int] | None = [] if static_graph else None
        self.op: AnyReduceOp = ReduceOp.AVG
        # Called before the first bucket of a round is issued.
        self.announce: Callable[[], None] | None = None
        # Whether a backward that no output has announced is a round.
        self.expects_round = False
        self._is_round = False
        # Whether a gradient has arrived, or a bucket was issued, in this round.
        self._is_open = False
        self._is_announced = False
        self._next = 0
        # The order of arrival in the first round, which all ranks take from rank 0; None once it is in use.
        self._arrived: list[int] | None = []
        self._new_order: list[int] | None = None
        dense = [place.index for place in self._places if place.name not in sparse]
        self._make_buckets(dense[::-1])
        self._handles = [
            place.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, place))
            for place in self._places
        ]

    def set_hook(self, state: Any, hook: Hook) -> None:
        """Have a communication hook average the buckets from now on."""
        self._hook = (state, hook)

    def remove_hooks(self) -> None:
        """Leave the parameters alone from now on."""
        for handle in self._handles:
            handle.remove()

    def prepare(self) -> None:
        """Do, before a forward, what an earlier round has left to do."""
        if self._end.is_awaited() or is_inside_backward():
            return
        self._recover()
        self._rebuild()

    def begin(self, is_round: bool) -> None:
        """Begin a backward, which is a round or none. Called inside of it, before any gradient arrives."""
        if self._end.is_awaited():
            return
        self._recover()
        self._rebuild()
        self._is_round = is_round
        self._end.ask(self._on_end)

    def answer(self) -> None:
        """Take part, with zeros, in a round of the ranks that still have inputs."""
        self.prepare()
        for place in self._places:
            place.parameter.grad = None
        self._agreement.forget()
        self._is_announced = True
        with suppress(BackwardFailed):
            self._finish(is_answer=True)
        for place in self._places:
            place.parameter.grad = None

    def _on_gradient(self, place: Place, parameter: Any) -> None:
        if not self._end.is_awaited():
            self.begin(self.expects_round)
        self._agreement.flags[place.index] = 1
        if self._is_round:
            self._is_open = True
            self._arrive(place, parameter.grad)

    def _arrive(self, place: Place, gradient: Any) -> None:
        if gradient.requires_grad:
            raise RuntimeError(
                f"DistributedDataParallel averages gradients outside of the graph, so a backward with "
                f"create_graph=True cannot be differentiated again ({place}). Use torch.autograd.grad(..., "
                "create_graph=True), and call backward() without it on what you compute from that."
            )
        bucket = place.bucket
        if bucket is None:  # sparse or left out: averaged at the end
            place.arrivals += 1
            return
        if bucket.is_issued:
            place.arrivals += 1
            self._agreement.mark_late(place.index)
            return
        bucket.take(place, gradient.to_dense() if gradient.is_sparse else gradient)
        if not place.arrivals and self._arrived is not None:
            self._arrived.append(place.index)
        place.arrivals += 1
        if place.arrivals == place.awaited:
            bucket.missing -= 1
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._issue(self._buckets[self._next])

    def _open(self) -> None:
        self._is_open = True
        if self.announce is not None and not self._is_announced:
            self._is_announced = True
            self.announce()

    def _issue(self, bucket: Bucket) -> None:
        self._open()
        for place in bucket.places:
            if not place.arrivals:
                bucket.fill(place)
        bucket.close()
        bucket.is_issued = True
        self._next += 1
        if self._hook is None:
            bucket.pending = self._group.all_reduce(bucket.buffer, self.op, True)
        else:
            state, hook = self._hook
            is_last = bucket.index == len(self._buckets) - 1
            bucket.pending = hook(state, GradBucket(bucket.index, bucket.buffer, bucket.places, is_last))

    def _on_end(self) -> None:
        if self._is_round and (self._is_open or self._end.accumulates_gradients()):
            self._finish()

    def _recover(self) -> None:
        """Finish, on behalf of the other ranks, a round whose backward failed on this one."""
        if self._is_open:
            self._agreement.mark_failed()
            self._finish()

    def _finish(self, is_answer: bool = False) -> None:
        try:
            self._open()
            for bucket in self._buckets[self._next :]:
                self._issue(bucket)
            for bucket in self._buckets:
                self._await(bucket)
            if not is_answer:
                self._check_static_graph()
            for place in self._left_out:
                if self._agreement.flags[place.index]:
                    self._agreement.mark_late(place.index)
            self._agreement.settle()
            self._conclude()
        finally:
            self._is_open = self._is_announced = False
            self._next = 0
            for bucket in self._buckets:
                bucket.reset()
            for place in [*self._sparse, *self._left_out]:
                place.arrivals = 0

    def _await(self, bucket: Bucket) -> None:
        try:
            result = bucket.pending.wait()
        except DistError as error:
            error.add_note(f"while the gradients of {bucket} of {len(self._buckets)} were averaged")
            raise
        if self._hook is not None:
            bucket.replace(result[0] if isinstance(result, (list, tuple)) else result)

    def _conclude(self) -> None:
        if failed := self._agreement.failed():
            if self._group.rank() not in failed:
                raise BackwardFailed(ranks=failed)
            return
        for index in self._agreement.late():
            self._add_late(self._places[index])
        everything = self._agreement.is_plain
        for bucket in self._buckets:
            for place in bucket.places:
                if everything or self._agreement.is_used(place.index):
                    bucket.give(place)
        for place in self._sparse:
            if self._agreement.is_used(place.index):
                place.parameter.grad = average_sparse(self._group, place.parameter, self.op)
        self._learn()
        if self._agreement.is_changed():
            raise self._graph_changed()

    def _add_late(self, place: Place) -> None:
        """Average what came after its bucket was issued, on any rank, and add it."""
        gradient = place.parameter.grad
        late = place.new().zero_() if gradient is None else place.new().copy_(gradient)
        self._group.all_reduce(place.flat(late), self.op)
        if place.bucket is None:
            place.parameter.grad = late
        else:
            place.bucket.add(place, late)
            place.awaited = AT_END

    def _learn(self) -> None:
        """Take over the order in which gradients have arrived on rank 0, for the next round."""
        if self._static_uses == []:
            self._static_uses = [place.arrivals for place in self._places]
        if self._arrived is None:
            return
        # What has not arrived on rank 0 comes last, in any order that is the same everywhere.
        rank_in_order = torch.full((len(self._places),), len(self._places), dtype=torch.int64)
        rank_in_order[torch.tensor(self._arrived, dtype=torch.int64)] = torch.arange(len(self._arrived))
        self._group.broadcast(rank_in_order, 0)
        self._arrived = None
        dense = [place for place in self._places if place.bucket is not None]
        if self._leaves_out_unused:
            self._left_out = [place for place in dense if not self._agreement.is_used(place.index)]
            for place in self._left_out:
                place.bucket = place.view = None
        kept = [place.index for place in dense if place.bucket is not None]
        self._new_order = sorted(kept, key=rank_in_order.tolist().__getitem__)

    def _rebuild(self) -> None:
        order, self._new_order = self._new_order, None
        if order is None:
            return
        for place in self._places:
            if place.view is not None and place.parameter.grad is place.view:
                place.parameter.grad = place.view.clone()  # the memory is divided anew
            if self._static_uses:
                place.awaited = self._static_uses[place.index]
        self._make_buckets(order)

    def _make_buckets(self, order: Sequence[int]) -> None:
        alone = [place.nbytes >= SINGLE_BYTES and place.dtype is place.parameter.dtype for place in self._places]
        pieces = [
            Piece(place.nbytes, f"{place.dtype}{' delayed' if place.index in self._delayed else ''}", one)
            for place, one in zip(self._places, alone, strict=True)
        ]
        plan = plan_buckets(pieces, sorted(order, key=self._delayed.__contains__), self._limits)
        self._buckets, self._memory = make_buckets(self._group, self._places, plan, alone, self._memory)

    def _check_static_graph(self) -> None:
        for place, uses in zip(self._places, self._static_uses or (), strict=False):
            if place.arrivals != uses:
                self._agreement.mark_changed(place.index)

    def _graph_changed(self) -> GraphChanged:
        uses = self._static_uses or []
        changes = [
            (place.name, place.shape, then, place.arrivals)
            for place, then in zip(self._places, uses, strict=True)
            if place.arrivals != then
        ]
        found: list[Any] = [None] * self._group.size()
        all_gather_object(found, changes, self._group)
        return GraphChanged(uses=dict(enumerate(found)))
