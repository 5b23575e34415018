"""DistributedDataParallel goes on when ranks are lost: with those that live, and with new processes.

The models are small and have two kinds of gradients: one of 1 MiB, which stays where autograd has put it, and some that
share a bucket. The others' parameters stay equal, bit for bit, whenever a rank dies.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from failures.waiting_calls import TRANSPORTS, on

import procgroup as dist
from procgroup.errors import PeerFailed, PeerLost
from waiting import Meeting, wait_until
from world import attempt, run, run_command, start

pytestmark = pytest.mark.torch

transports = pytest.mark.parametrize("transport", TRANSPORTS)

STEPS = 12


def make_model(with_buffers: bool = False) -> Any:
    from torch import nn

    middle = nn.BatchNorm1d(512) if with_buffers else nn.Tanh()
    return nn.Sequential(nn.Linear(512, 512), middle, nn.Linear(512, 3))


def inputs_of(step: int, rank: int) -> Any:
    import torch

    return torch.randn(4, 512, generator=torch.Generator().manual_seed(1000 * step + rank))


def digest(model: Any) -> str:
    import hashlib

    values = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(values).hexdigest()[:16]


def train(
    rank: int, size: int, deaths: dict[int, float], seed: int, with_buffers: bool, moment: str
) -> tuple[int, list[int], str]:
    """Train; ranks in ``deaths`` die around that step. Return this rank, the sizes by step, and the model's digest."""
    import torch

    from procgroup.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group(timeout=20)
    model = DistributedDataParallel(make_model(with_buffers), on_lost_rank="shrink")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sizes = []
    delay = random.Random(seed + rank).uniform(0.0, 0.02)
    for step in range(STEPS):
        if deaths.get(rank) == step:
            if moment == "soon":  # from another thread, in whatever this one is
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif moment == "forward":
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = (model(inputs_of(step, rank)) ** 2).mean()
        if deaths.get(rank) == step and moment == "backward":
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        sizes.append(dist.get_world_size())
        optimizer.step()
    if rank in deaths:
        time.sleep(60)  # it dies after its last step
    model.retry(dist.barrier)
    dist.destroy_process_group()
    return dist_rank_of(model), sizes, digest(model)


def dist_rank_of(model: Any) -> int:
    return int(model.process_group.rank())


def check_survivors(outcomes: list[Any], deaths: dict[int, float]) -> None:
    survivors = [outcome for outcome in outcomes if outcome.rank not in deaths]
    for outcome in survivors:
        assert outcome.ok, outcome
    ranks, sizes, digests = zip(*(outcome.value for outcome in survivors), strict=True)
    assert ranks == tuple(range(len(survivors)))
    assert len(set(digests)) == 1
    for one in sizes:
        assert one[-1] >= len(survivors)
        assert sorted(one, reverse=True) == list(one)


@transports
@pytest.mark.parametrize(("moment", "with_buffers"), [("forward", True), ("backward", False)], ids=str)
@pytest.mark.parametrize("deaths", [{2: 5}, {0: 5}, {0: 0}, {1: 5, 3: 5}, {3: 4, 0: 5, 1: 6}], ids=str)
def test_the_others_train_on_and_keep_the_same_parameters(
    transport: str, moment: str, with_buffers: bool, deaths: dict[int, float]
) -> None:
    with start(train, 4, args=(deaths, 0, with_buffers, moment), environment=on(transport), torch=True) as world:
        check_survivors(world.wait(60), deaths)


@transports
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 2 else ()) for seed in range(60)])
def test_they_do_whenever_a_rank_dies(transport: str, seed: int) -> None:
    choice = random.Random(seed)
    deaths = {rank: choice.randrange(STEPS - 1) for rank in choice.sample(range(4), choice.choice((1, 1, 2, 3)))}
    args = (deaths, seed, choice.random() < 0.5, "soon")
    with start(train, 4, args=args, environment=on(transport), torch=True) as world:
        check_survivors(world.wait(60), dict(deaths))


def lose_in_one_step(rank: int, size: int) -> Any:
    """Return the gradient of a step in which rank 1 dies, and what the others' own gradients are."""
    import torch

    from procgroup.parallel import DistributedDataParallel

    dist.init_process_group(timeout=20)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False), on_lost_rank="shrink")
    loss = model(torch.full((1, 3), float(rank))).sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    gradient = model.module.weight.grad.flatten().tolist()
    dist.destroy_process_group()
    return gradient


@transports
def test_the_step_of_the_loss_has_the_mean_of_those_who_live(transport: str) -> None:
    with start(lose_in_one_step, 4, environment=on(transport), torch=True) as world:
        outcomes = world.wait(30)
    assert [outcomes[rank].value for rank in (0, 2, 3)] == [pytest.approx([5 / 3] * 3)] * 3


def lose_between_two_buckets(rank: int, size: int, meeting: Meeting) -> Any:
    """Return the gradients of a step in which rank 1 dies when all ranks have the average of the first bucket."""
    import torch

    from procgroup.parallel import DistributedDataParallel

    dist.init_process_group(timeout=60)
    layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    model = DistributedDataParallel(layers, bucket_cap_mb=1e-6, on_lost_rank="shrink")

    def meet(_: Any) -> None:
        def states() -> list[str]:
            return [call["state"] for call in dist.group.WORLD.records() if call["op"] == "all_reduce"]

        wait_until(lambda: states()[-1:] == ["completed"])
        meeting.reach(f"rank {rank} has the average")
        if rank == 1:
            for other in (0, 2):
                meeting.wait_for(f"rank {other} has the average")
            os.kill(os.getpid(), signal.SIGKILL)

    def add_up(inputs: Any) -> Any:
        first = layers[0](inputs)
        first.register_hook(meet)  # its backward comes after that of the last layer, whose bucket is the first one
        return first + layers[1](inputs)

    layers.forward = add_up
    model(torch.full((1, 1), (rank + 1.0) ** 2)).sum().backward()
    gradients = [layer.weight.grad.item() for layer in layers]
    dist.destroy_process_group()
    return gradients


def test_a_bucket_that_was_averaged_before_the_loss_is_averaged_anew_from_the_gradients(tmp_path: Path) -> None:
    with start(lose_between_two_buckets, 3, args=(Meeting(tmp_path),), environment=on("tcp"), torch=True) as world:
        outcomes = world.wait()
    assert [outcomes[rank].value for rank in (0, 2)] == [[5.0, 5.0]] * 2


def accumulate(rank: int, size: int) -> Any:
    import torch

    from procgroup.parallel import DistributedDataParallel

    dist.init_process_group(timeout=20)
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    model = DistributedDataParallel(
        torch.nn.ModuleDict({"sparse": embedding, "unused": torch.nn.Linear(2, 2), "dense": torch.nn.Linear(2, 1)}),
        on_lost_rank="shrink",
    )
    model.module.forward = lambda index: model.module["dense"](model.module["sparse"](index)).sum()
    with model.no_sync():
        model(torch.tensor([0])).backward()
    loss = model(torch.tensor([rank]))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    rows = sorted(embedding.weight.grad.coalesce().indices().flatten().tolist())
    dist.destroy_process_group()
    return rows, model.module["unused"].weight.grad is None


def test_accumulated_sparse_and_unused_gradients_survive_a_loss() -> None:
    with start(accumulate, 3, torch=True) as world:
        outcomes = world.wait(30)
    assert [outcomes[rank].value for rank in (1, 2)] == [([0, 1, 2], True)] * 2


def average_losses(rank: int, size: int) -> Any:
    import torch

    from procgroup.parallel import DistributedDataParallel

    dist.init_process_group(timeout=20)
    model = DistributedDataParallel(torch.nn.Linear(1, 1), on_lost_rank="shrink")

    def average(value: float) -> float:
        total = torch.tensor([value])
        dist.all_reduce(total, dist.ReduceOp.AVG)
        return total.item()

    found = []
    for step in range(6):
        model(torch.ones(1)).backward()
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        found.append(model.retry(lambda: average(float(rank))))
    dist.destroy_process_group()
    return found


def test_collectives_of_the_program_are_made_again_in_retry() -> None:
    with start(average_losses, 3, torch=True) as world:
        outcomes = world.wait(30)
    assert [outcomes[rank].value for rank in (0, 2)] == [[1.0] * 6] * 2


def train_two(rank: int, size: int, death: int) -> Any:
    import torch

    from procgroup.parallel import DistributedDataParallel

    torch.manual_seed(3)
    dist.init_process_group(timeout=20)
    models = [DistributedDataParallel(torch.nn.Linear(4, 4), on_lost_rank="shrink") for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    call = 0
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            if rank == 1 and call == death:
                os.kill(os.getpid(), signal.SIGKILL)
            call += 1
            optimizer.zero_grad()
            model(torch.full((1, 4), float(rank + step))).square().mean().backward()
            optimizer.step()
    dist.destroy_process_group()
    return [digest(model) for model in models]


@pytest.mark.parametrize("death", [4, 5])
def test_several_models_share_the_smaller_group(death: int) -> None:
    with start(train_two, 3, args=(death,), torch=True) as world:
        outcomes = world.wait(30)
    assert outcomes[0].ok and outcomes[0].value == outcomes[2].value


def misuse(rank: int, size: int) -> Any:
    import torch

    from procgroup.parallel import DistributedDataParallel

    dist.init_process_group()
    raised = []
    linear = torch.nn.Linear(1, 1)
    for options in ({"on_lost_rank": "ignore"}, {"on_lost_rank": "shrink", "process_group": dist.new_group([0, 1])}):
        try:
            DistributedDataParallel(linear, **options)
        except ValueError as error:
            raised.append(str(error))
    model = DistributedDataParallel(linear, on_lost_rank="shrink")
    for call in (lambda: model.register_comm_hook(None, print), model.join):
        try:
            call()
        except RuntimeError as error:
            raised.append(str(error))
    try:
        model.retry(lambda: model(torch.ones(1)).backward())
    except RuntimeError as error:
        raised.append(str(error))
    try:
        model.share_state(3)
    except TypeError as error:
        raised.append(str(error))
    dist.destroy_process_group()
    return raised


def test_what_cannot_go_on_is_refused() -> None:
    choice, group, hook, join, nested, state = run(misuse, 2, torch=True)[0]
    assert choice == "expected on_lost_rank to be one of raise, shrink, replace, got 'ignore'"
    assert "is for the default group of procgroup" in group
    assert "cannot be used with communication hooks" in hook
    assert join == "join() cannot be used with on_lost_rank='shrink'"
    assert nested == "retry() and a forward or backward of the model cannot be inside of one another"
    assert state == "expected objects with state_dict() and load_state_dict(), got 3"


def fail_by_exception(rank: int, size: int, on_lost_rank: str) -> Any:
    import torch

    from procgroup.parallel import DistributedDataParallel

    dist.init_process_group(timeout=20)
    model = DistributedDataParallel(torch.nn.Linear(1, 1), on_lost_rank=on_lost_rank)
    for step in range(4):
        if rank == 1 and step == 2:
            raise KeyError("a bug")
        model(torch.ones(1)).backward()
    dist.destroy_process_group()
    return dist_rank_of(model)


def test_a_rank_that_ends_with_an_exception_is_lost_too() -> None:
    outcomes = attempt(fail_by_exception, 3, args=("shrink",), torch=True)
    assert [outcomes[rank].value for rank in (0, 2)] == [0, 1]
    assert isinstance(outcomes[1].error, KeyError)
    assert "DistributedDataParallel goes on with 2 of 3 ranks" in outcomes[0].output


def test_by_default_the_others_raise() -> None:
    outcomes = attempt(fail_by_exception, 3, args=("raise",), torch=True)
    assert all(isinstance(outcomes[rank].error, (PeerLost, PeerFailed)) for rank in (0, 2))


PROGRAM = Path(__file__).with_name("replaced_training.py")


def train_under_the_launcher(*flags: str, deaths: str, restarts: int = 6) -> list[str]:
    done = run_command(
        [
            *(sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "4", "--replace"),
            *("--max-restarts", str(restarts), str(PROGRAM), deaths, *flags),
        ],
        timeout=250,
        environment={"PYTHONPATH": str(PROGRAM.parent.parent)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line.split(" ", 2)[2] for line in done.stdout.splitlines() if " digest " in line)


@pytest.mark.parametrize(
    ("deaths", "flags"),
    [
        ("2:20", ["--buffers"]),
        ("2:5,0:20,2:40", []),
        pytest.param("0:20", [], marks=pytest.mark.slow),
        pytest.param("1:20,3:20", [], marks=pytest.mark.slow),
        pytest.param("2:5,0:20,2:40", ["--buffers"], marks=pytest.mark.slow),
        *(
            pytest.param("1:20,3:21,0:40", ["--seed", str(seed), *buffers], marks=pytest.mark.slow)
            for seed in range(10)
            for buffers in ([], ["--buffers"])
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else " ".join(one),
)
def test_new_processes_take_the_place_of_lost_ones(deaths: str, flags: list[str]) -> None:
    """All four end with the same parameters, optimizer and number of steps."""
    lines = train_under_the_launcher(*flags, deaths=deaths)
    assert len(lines) == 4
    assert len({line.partition(" digest ")[2] for line in lines}) == 1
    assert all("steps 60 of 4 ranks" in line for line in lines)
