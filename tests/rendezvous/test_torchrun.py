"""Under torchrun, whose agent keeps MASTER_PORT for a store of torch's, ranks meet by env:// as under any launcher."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.errors import DistNetworkError, RendezvousError, RendezvousTimeout
from world import Outcome, attempt, free_port, run, run_command, start

# The first test that needs torch waits until a server of ranks has imported it.
pytestmark = pytest.mark.torch

Done = subprocess.CompletedProcess[str]

TORCHRUN = ("-m", "torch.distributed.run")
LAUNCH = ("-m", "torch.distributed.launch")
ATTEMPT_0 = "procgroup/attempt_0/store"

ROUNDS = """
import numpy as np, os, procgroup as dist
for round in range(3):
    dist.init_process_group(timeout=60)
    number = np.array([dist.get_rank()])
    dist.all_reduce(number)
    os.write(1, f"round {round} rank {dist.get_rank()} has {number[0]}\\n".encode())
    dist.destroy_process_group()
"""

FAILS_AT_FIRST = """
import os, sys, procgroup as dist
dist.init_process_group(timeout=60)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0" and dist.get_rank() == 1:
    sys.exit(1)
dist.barrier()
os.write(1, f"attempt {attempt} rank {dist.get_rank()} is through\\n".encode())
dist.destroy_process_group()
"""

ONE_NEVER_COMES = """
import os, sys, time, procgroup as dist
if os.environ["RANK"] == sys.argv[1]:
    time.sleep(8)
    sys.exit()
dist.init_process_group(timeout=4)
"""


def under(launcher: tuple[str, ...], program: str, directory: Path, *arguments: str) -> Done:
    """Run a program under one of torch's launchers; of ``launcher`` PORT is a free port."""
    script = directory / "script.py"
    script.write_text(program)
    flags = [flag.replace("PORT", str(free_port())) for flag in launcher]
    return run_command([sys.executable, *flags, str(script), *arguments])


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ((*TORCHRUN, "--standalone"), 4),
        ((*TORCHRUN, "--master-addr=127.0.0.1", "--master-port=PORT"), 2),
        pytest.param((*TORCHRUN, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:PORT"), 2, marks=pytest.mark.slow),
        pytest.param((*LAUNCH, "--use-env"), 2, marks=pytest.mark.slow),
        pytest.param(LAUNCH, 2, marks=pytest.mark.slow),
    ],
    ids=["standalone", "address", "c10d", "launch-use-env", "launch"],
)
def test_ranks_meet_again_and_again(launcher: tuple[str, ...], size: int, tmp_path: Path) -> None:
    done = under((*launcher, f"--nproc-per-node={size}"), ROUNDS, tmp_path)
    assert done.returncode == 0, done.stderr
    total = size * (size - 1) // 2
    expected = [f"round {number} rank {rank} has {total}" for number in range(3) for rank in range(size)]
    assert sorted(done.stdout.splitlines()) == expected
    assert "procgroup:" not in done.stderr


def test_after_a_failed_attempt_the_ranks_meet_in_the_next(tmp_path: Path) -> None:
    done = under((*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"), FAILS_AT_FIRST, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"attempt 1 rank {rank} is through" for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["0", "1"])
def test_torchrun_shows_which_rank_never_came(missing: str, tmp_path: Path) -> None:
    done = under((*TORCHRUN, "--standalone", "--nproc-per-node=2"), ONE_NEVER_COMES, tmp_path, missing)
    assert done.returncode != 0
    assert f"RendezvousTimeout: rendezvous not complete after 4 s: still missing rank {missing} of 2" in done.stderr


@pytest.fixture
def agent() -> Iterator[Any]:
    """The store that torchrun's agent hosts."""
    import torch.distributed

    yield torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def surroundings(agent: Any, **more: str) -> dict[str, str]:
    return {"MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True", **more}


def meet(rank: int, size: int, timeout: float = 15, pauses: tuple[float, ...] = (0, 0)) -> str:
    time.sleep(pauses[rank])
    dist.init_process_group(timeout=timeout)
    number = np.ones(1)
    dist.all_reduce(number)
    assert number[0] == size
    dist.destroy_process_group()
    return os.environ["PROCGROUP_JOB_KEY"]


def test_the_ranks_share_a_secret_that_rank_0_made(agent: Any) -> None:
    first, second = run(meet, 2, environment=surroundings(agent), torch=True)
    assert first == second == json.loads(agent.get(ATTEMPT_0))["job_key"]
    assert len(bytes.fromhex(first)) == 32


def test_a_secret_of_the_user_is_not_shown_to_the_agent(agent: Any) -> None:
    run(meet, 2, environment=surroundings(agent, PROCGROUP_JOB_KEY="ab" * 32), torch=True)
    assert json.loads(agent.get(ATTEMPT_0))["job_key"] == ""
    assert not any(b"ab" * 32 in agent.get(key) for key in agent.list_keys())


def test_the_store_listens_where_the_agent_s_does(agent: Any) -> None:
    run(meet, 2, environment=surroundings(agent), torch=True)
    assert json.loads(agent.get(ATTEMPT_0))["host"] == "127.0.0.1"


def test_a_record_of_a_rank_0_that_is_no_more_is_passed_over(agent: Any) -> None:
    agent.set(ATTEMPT_0, json.dumps({"host": "127.0.0.1", "port": free_port(), "job_key": "cd" * 32}))
    outcomes = attempt(meet, 2, args=(15, (1, 0)), environment=surroundings(agent), torch=True)
    assert all(outcome.ok for outcome in outcomes), outcomes


def fail_and_meet(rank: int, size: int) -> None:
    """Let rank 1's first initialisation fail before rank 0 has begun with its own."""
    from torch.distributed import TCPStore

    agent = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 1:
        with pytest.raises(RendezvousTimeout):
            dist.init_process_group(timeout=0.2)
        agent.set("rank 1 has failed", "")
    agent.wait(["rank 1 has failed"])
    meet(rank, size)


def test_ranks_meet_although_one_of_them_has_failed_before(agent: Any) -> None:
    run(fail_and_meet, 2, environment=surroundings(agent), torch=True)


def only(rank: int, size: int, comes: int, timeout: float) -> None:
    if rank == comes:
        dist.init_process_group(timeout=timeout)


@pytest.mark.parametrize("missing", [0, 1])
def test_the_rank_that_never_came_is_named_within_the_timeout(agent: Any, missing: int) -> None:
    with start(only, 2, args=(1 - missing, 1.0), environment=surroundings(agent), torch=True) as world:
        started = time.monotonic()
        outcomes = world.wait()
    assert time.monotonic() - started < 20
    error = outcomes[1 - missing].error
    assert isinstance(error, RendezvousTimeout), outcomes
    assert error.missing == (missing,)
    assert dict(error.joined) == {1 - missing: socket.gethostname()}


def in_words(outcome: Outcome) -> str:
    assert isinstance(outcome.error, DistNetworkError), outcome
    return str(outcome.error)


def test_an_agent_that_is_not_there_is_a_network_error_within_the_timeout() -> None:
    port = free_port()
    environment = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with start(meet, 2, args=(1.0,), environment=environment, torch=True) as world:
        started = time.monotonic()
        outcomes = world.wait()
    assert time.monotonic() - started < 20
    for rank, outcome in enumerate(outcomes):
        expected = rf"rank {rank} of 2 did not get to .*agent .*127\.0\.0\.1:{port}, within 1 s: .*init_method='tcp://"
        assert re.search(expected, in_words(outcome))


def test_a_secret_that_only_rank_0_was_given_is_told_at_once(agent: Any) -> None:
    environments = [{"PROCGROUP_JOB_KEY": "ab" * 32}, {}]
    with start(meet, 2, environment=surroundings(agent), environments=environments, torch=True) as world:
        world.wait_for_end([1])
        world.kill(0)
        outcomes = world.wait()
    assert re.search(r"^rank 1 of 2 did not get to rank 0's store at 127\.0\.0\.1:\d+, .*KEY", in_words(outcomes[1]))


def without_torch(rank: int, size: int) -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]
    sys.modules["torch.distributed"] = None  # type: ignore[assignment]
    dist.init_process_group(timeout=15)


def test_without_torch_it_says_what_to_do(agent: Any) -> None:
    for rank, outcome in enumerate(attempt(without_torch, 2, environment=surroundings(agent))):
        assert type(outcome.error) is RendezvousError, outcome
        expected = rf"^rank {rank} was started by torchrun, .* PyTorch cannot be imported here: .*`procgroup run`"
        assert re.search(expected, str(outcome.error))


def alone(rank: int, size: int) -> bool:
    dist.init_process_group()
    return "torch" in sys.modules


def test_a_world_of_one_and_other_launchers_do_without_torch() -> None:
    assert run(alone, 1, environment={"TORCHELASTIC_USE_AGENT_STORE": "True"}) == [False]
    assert run(alone, 2, environment={"TORCHELASTIC_USE_AGENT_STORE": "False"}) == [False, False]


# Two hosts: network namespaces with a cable between them. The agent's store is at 10.9.0.1, rank 0 at 10.9.0.2.
TWO_HOSTS = """
set -e
ip link set lo up && ip link add left type veth peer name right
unshare -n sleep 60 & other=$!
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link set right netns $other
ip addr add 10.9.0.1/24 dev left && ip link set left up
nsenter -t $other -n sh -c "ip addr add 10.9.0.2/24 dev right && ip link set right up && ip link set lo up"
export MASTER_ADDR=10.9.0.1 MASTER_PORT=29500 WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=True
RANK=0 nsenter -t $other -n "$PYTHON" -c "$PROGRAM" & first=$!
RANK=1 "$PYTHON" -c "$AGENT$PROGRAM" || { kill $other; exit 1; }
wait $first || { kill $other; exit 1; }
kill $other
"""
AGENT = """
import torch.distributed
agent = torch.distributed.TCPStore("10.9.0.1", 29500, is_master=True, wait_for_workers=False)
"""


def can_unshare() -> bool:
    return subprocess.run(["unshare", "-n", "ip", "link"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_rank_0_may_be_on_another_host_than_the_agent_s_store() -> None:
    if not can_unshare():
        pytest.skip("needs root, to make namespaces of its own")
    environment = {"PYTHON": sys.executable, "PROGRAM": ROUNDS, "AGENT": AGENT}
    done = run_command(["unshare", "-n", "sh", "-c", TWO_HOSTS], environment=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"round {n} rank {rank} has 1" for n in range(3) for rank in (0, 1)]
