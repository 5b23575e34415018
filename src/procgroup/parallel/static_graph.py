"""A graph that was promised to be the same in every backward: how often each parameter is used in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procgroup.api.objects import all_gather_object
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.agreement import Agreement
from procgroup.parallel.place import Place
from procgroup.parallel.training_errors import GraphChanged


class StaticGraph:
    """How often autograd has added to each gradient in the first round, on this rank."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._uses: list[int] | None = None

    def learn(self) -> None:
        """Expect from now on what there was in the first round."""
        if self._uses is not None:
            return
        self._uses = [place.arrivals for place in self._places]
        for place in self._places:
            place.awaited = place.arrivals

    def compare(self, agreement: Agreement) -> None:
        """Say which parameters were not used as expected."""
        for place, uses in zip(self._places, self._uses or (), strict=False):
            if place.arrivals != uses:
                agreement.mark_changed(place.index)

    def error(self, group: ProcessGroup) -> GraphChanged:
        """Return the error that tells all ranks what has changed on any; all of them call this."""
        changes = [
            (place.name, place.shape, then, place.arrivals)
            for place, then in zip(self._places, self._uses or (), strict=True)
            if place.arrivals != then
        ]
        found: list[Any] = [None] * group.size()
        all_gather_object(found, changes, group, safe=True)
        return GraphChanged(uses=dict(enumerate(found)))
