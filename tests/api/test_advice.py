"""What an error about an argument advises works: each piece of advice is taken as it is written, and followed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup import functional
from procgroup.testing import connected_groups, run_ranks


def read_only() -> Any:
    array = np.ones(3)
    array.flags.writeable = False
    return array


class Column:
    """As a Series of pandas and of polars, it is no array, and gives one."""

    def to_numpy(self) -> Any:
        return np.ones(3)


REFUSED: dict[str, Any] = {
    "a NumPy scalar": lambda: np.float64(1.0),
    "a NumPy bool": lambda: np.bool_(True),
    "a NumPy integer": lambda: np.int64(1),
    "a number": lambda: 1.0,
    "an integer": lambda: 1,
    "a complex number": lambda: 1j,
    "a list": lambda: [1.0, 1.0],
    "a tuple": lambda: (1, 1),
    "bytes": lambda: b"\1\1",
    "a read-only buffer": lambda: memoryview(b"\1\1"),
    "a read-only array": read_only,
    "a broadcast view": lambda: np.broadcast_to(np.ones(1), (3,)),
    "the other byte order": lambda: np.ones(3, np.dtype(np.float64).newbyteorder()),
    "a masked array": lambda: np.ma.ones(3),
    "a structured array": lambda: np.ones(3, [("a", "u1"), ("b", "u1")]),
    "dates": lambda: np.ones(3, "M8[s]"),
    "durations": lambda: np.ones(3, "m8[ns]"),
    "long doubles": lambda: np.ones(3, np.longdouble),
    "long complex numbers": lambda: np.ones(3, np.clongdouble),
    "a column": Column,
}


def follow(text: str, **names: Any) -> Any:
    """Evaluate the expression that an error advises to pass."""
    advised = re.search(r"Pass [^;:]*?((?:numpy\.|bytearray\(|tensor\b|tree\b).*?\)+)(?=[,.;]|$)", text)
    assert advised, text
    return eval(advised[1], {"numpy": np, "value": 1.0, **names})


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_call_advises_to_pass_can_be_passed(kind: str, size: int) -> None:
    with connected_groups(size) as groups:
        with pytest.raises((TypeError, ValueError)) as refused:
            groups[0].all_reduce(REFUSED[kind](), dist.ReduceOp.PRODUCT, async_op=True)
        passed = [follow(str(refused.value), tensor=REFUSED[kind]()) for _ in groups]
        works = [
            group.all_reduce(array, dist.ReduceOp.PRODUCT, async_op=True)
            for group, array in zip(groups, passed, strict=True)
        ]
        for work in works:
            work.wait()
        assert np.array(passed[0]).astype(complex).ravel()[0] in (1, 1j, -1)


MASKED = np.ma.ones(1)


@pytest.mark.parametrize("tree", [[MASKED], {"layers": [{"weights": (MASKED, [2])}]}, MASKED])
def test_what_a_function_of_trees_advises_is_an_expression_of_the_tree(tree: Any) -> None:
    def call() -> Any:
        with pytest.raises(TypeError) as refused:
            functional.all_reduce(tree)
        return functional.all_reduce(follow(str(refused.value), tree=tree)).tolist()

    assert run_ranks(call, 2) == [[2.0]] * 2


@pytest.mark.parametrize("thing", [np.array(["a", "b"]), np.array([b"a"]), np.array([None, {}]), "text", {"a": 1}])
def test_what_is_sent_as_an_object_is_led_to_the_calls_for_objects(thing: Any) -> None:
    def call() -> Any:
        with pytest.raises(TypeError, match=r"Send it as an object: all_gather_object\(\[\.\.\.\], tensor\)"):
            dist.all_reduce(thing)
        things: list[Any] = [None, None]
        dist.all_gather_object(things, thing)
        return [np.array_equal(one, thing) for one in things]

    assert run_ranks(call, 2) == [[True, True]] * 2


def test_a_call_without_its_root_names_its_own_parameters() -> None:
    def call() -> None:
        group = dist.new_group([1])
        everyone = dist.new_group([1, 0], sort_ranks=False)
        with pytest.raises(ValueError, match=r"pass src=, a global rank, or group_src=, a rank of the group\."):
            dist.broadcast(np.ones(1))
        with pytest.raises(ValueError, match=r"pass dst=, a global rank, or group_dst=, a rank of the group\."):
            dist.reduce(np.ones(1))
        with pytest.raises(ValueError, match=r"Can't specify both .*: pass dst=, a global rank, or group_dst="):
            dist.send(np.ones(1), 0, group_dst=0)
        with pytest.raises(
            ValueError, match=r"Invalid destination .* use functional\.sendrecv, in which a rank may be"
        ):
            dist.isend(np.ones(1), dist.get_rank())
        if dist.get_rank() == 1:
            text = r"`src` is a global rank: for the group's own rank 0, which is global rank 1, pass group_src=0\."
            with pytest.raises(ValueError, match=text):
                dist.broadcast(np.ones(1), src=0, group=group)
            with pytest.raises(ValueError, match=text.replace("src", "dst")):
                functional.sendrecv(1, dst=0, src=1, group=group)
        assert functional.broadcast(dist.get_rank(), group_src=0, group=everyone) == 1

    run_ranks(call, 2)
