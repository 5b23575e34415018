"""The contract for authors of backends: right backends pass it, and what is wrong with one is found and described."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import pytest
from groups.toy_backend import StoreBackend

import procgroup as dist
from procgroup.groups.backend import Call
from procgroup.testing.backend_contract import BackendContract


class Opened(StoreBackend):
    """Gets ready together with the other ranks, and makes one kind of call only."""

    is_open = False

    def open(self) -> Iterator[int]:
        self.store.set(f"ready/{self.rank}", "")
        for rank in range(self.size):
            while not self.store.check([f"ready/{rank}"]):
                yield rank
        self.is_open = True

    def supports(self, op: str, dtype: str, reduce_op: str) -> bool:
        return (op, dtype, reduce_op) == ("all_reduce", "float64", "SUM")

    def move(self, call: Call) -> Iterator[int]:
        assert self.is_open
        return super().move(call)


class Messages(StoreBackend):
    def supports(self, op: str, dtype: str, reduce_op: str) -> bool:
        return op in ("send", "recv")


class SwapsBlocks(StoreBackend):
    """Gives each rank of an all_to_all the block of its neighbour."""

    def move(self, call: Call) -> Iterator[int]:
        return super().move(call._replace(inputs=call.inputs[::-1]) if call.op == "all_to_all" else call)


class Blocks(StoreBackend):
    """Waits in the store, and not by a yield."""

    def _get(self, key: str, giver: int) -> Generator[int, None, Any]:
        yield giver
        return np.frombuffer(self.store.get(key), np.uint8)


class DoesNotWait(StoreBackend):
    """Takes zeros for what is not there yet."""

    def move(self, call: Call) -> Iterator[int]:
        moving = super().move(call)
        for _ in moving:
            if call.op == "all_reduce":
                return
            yield 0


class LacksMean(StoreBackend):
    """Says that it makes means, and fails to."""

    def move(self, call: Call) -> Iterator[int]:
        if call.reduce_op == "AVG":
            raise KeyError(call.reduce_op)
        return super().move(call)


class SupportsNothing(StoreBackend):
    def supports(self, op: str, dtype: str, reduce_op: str) -> bool:
        return False


class Disagrees(StoreBackend):
    def supports(self, op: str, dtype: str, reduce_op: str) -> bool:
        return not (self.rank == 1 and op == "gather" and dtype == "int16")


class SendsOnly(StoreBackend):
    def supports(self, op: str, dtype: str, reduce_op: str) -> bool:
        return op != "recv"


class WritesInputs(StoreBackend):
    def move(self, call: Call) -> Iterator[int]:
        yield from super().move(call)
        if call.op == "gather":
            call.inputs[0].setflags(write=True)
            call.inputs[0].view(np.uint8)[:1] ^= 1


class IgnoresTags(StoreBackend):
    """Lets messages meet in the order of their moves."""

    def move(self, call: Call) -> Iterator[int]:
        return super().move(call._replace(tag=0))


class SharesKeys(StoreBackend):
    """Its groups use the same keys of one store."""

    def __init__(self, store: dist.Store, *others: Any) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        super().__init__(store, *others)


class FailsToClose(StoreBackend):
    def close(self, failed: bool) -> None:
        raise OSError("closed already")


class FailsToCloseAfterFailures(StoreBackend):
    def close(self, failed: bool) -> None:
        if failed:
            raise OSError("closed already")


class Unequal(StoreBackend):
    """Takes blocks of an all_gather to be of one size."""

    def move(self, call: Call) -> Iterator[int]:
        if call.op == "all_gather" and len({block.size for block in call.outputs}) > 1:
            raise ValueError("blocks of several sizes")
        return super().move(call)


class NeedsElements(StoreBackend):
    def move(self, call: Call) -> Iterator[int]:
        if any(block.size == 0 for block in call.inputs):
            raise ZeroDivisionError("no elements")
        return super().move(call)


class TestToy(BackendContract):
    backend = "contract-toy"


class TestOpened(BackendContract):
    backend = "contract-opened"


class TestMessages(BackendContract):
    backend = "contract-messages"


FAULTS: dict[type[StoreBackend], tuple[str, list[str]]] = {
    SwapsBlocks: (
        "test_supported_calls_give_what_numpy_gives",
        ["all_to_all of 5 ", " on 2 ranks, seed ", "rank ", ": output ", "] is ", " instead of "],
    ),
    LacksMean: (
        "test_supported_calls_give_what_numpy_gives",
        ["(AVG) of 5 ", " ranks", ", seed ", "the backend supports this call, but it raised", "raised KeyError: 'AVG'"],
    ),
    Blocks: (
        "test_move_yields_while_it_waits",
        ["broadcast of 5 float32 on 2 ranks, root 0, ", "rank 1: move must yield as long as it waits", " for rank 0"],
    ),
    DoesNotWait: ("test_move_yields_while_it_waits", ["all_reduce(SUM) of 5 float32 on 2 ranks", "array 0: [0] is "]),
    SupportsNothing: ("test_supports_answers_the_same_on_all_ranks", ["supports no call"]),
    Disagrees: ("test_supports_answers_the_same_on_all_ranks", ["gather of 5 int16 on 2 ranks", "otherwise on rank 1"]),
    SendsOnly: ("test_supports_answers_the_same_on_all_ranks", ["messages of ", "otherwise for send than for recv"]),
    WritesInputs: ("test_every_length_and_root", ["gather of 1 float32 on 1 ranks, root 0, ", "input 0: [0] is "]),
    IgnoresTags: ("test_messages_go_by_tag_and_beside_other_calls", ["send of 5 float32 on 2 ranks, tag "]),
    SharesKeys: ("test_groups_do_not_meet", [" on 2 ranks", " instead of "]),
    FailsToClose: ("test_close_is_called_once", ["close must be called once, with False", "OSError: closed already"]),
    FailsToCloseAfterFailures: (
        "test_an_error_of_move_reaches_the_other_ranks",
        ["close must be called once, with True", "OSError: closed already"],
    ),
    Unequal: ("test_blocks_of_unequal_sizes", ["all_gather of 0 to 2 float32 on 2 ranks", "blocks of several sizes"]),
    NeedsElements: ("test_every_length_and_root", [" of 0 float32 on 1 ranks", "ZeroDivisionError: no elements"]),
}
RIGHT = {"toy": StoreBackend, "opened": Opened, "messages": Messages}

for name, make in [*RIGHT.items(), *((fault.__name__, fault) for fault in FAULTS)]:
    dist.Backend.register_backend(f"contract-{name}", make)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_described(fault: type[StoreBackend]) -> None:
    test, texts = FAULTS[fault]
    contract = BackendContract()
    contract.backend = f"contract-{fault.__name__}"
    contract.seconds = 4.0
    with pytest.raises(AssertionError) as raised:
        getattr(contract, test)()
    for text in texts:
        assert text in str(raised.value)
