"""Machines that lack something: little or no /dev/shm, little memory, no network; and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import TRANSPORTS, on

import procgroup as dist
from world import PORT_NAME, run, run_command, start, wait_until

RUN_WORLD = Path(__file__).with_name("run_world.py")
LOOPBACK = """import fcntl, socket, struct
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS: up and running
"""


def can_unshare() -> bool:
    return subprocess.run(["unshare", "-mn", "true"], capture_output=True, check=False).returncode == 0


needs_root = pytest.mark.skipif(not can_unshare(), reason="needs root, to make namespaces of its own")


def world_in(
    shell: str, function: str, size: int = 2, transport: str = "auto", flags: str = "-m"
) -> list[dict[str, Any]]:
    """Run a world of a function of this file after a shell has prepared a namespace for it."""
    command = f'{shell} && exec "{sys.executable}" "{RUN_WORLD}" "{__file__}" {function} 2 25'
    done = run_command(["unshare", flags, "sh", "-c", command])
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def work_hard(rank: int, size: int) -> str:
    dist.init_process_group(timeout=15)
    for length in (1, 5000, 3_000_000):
        array = np.ones(length)
        dist.all_reduce(array)
        assert (array == size).all()
        gathered = [np.zeros(length) for _ in range(size)]
        dist.all_gather(gathered, array)
        assert all((each == size).all() for each in gathered)
    return str(dist.group.WORLD.transport)


SHELLS = {
    "1 MiB": "mount -t tmpfs -o size=1m tmpfs /dev/shm",
    "full": "mount -t tmpfs -o size=1m tmpfs /dev/shm && (head -c 2m /dev/zero > /dev/shm/full 2>/dev/null; true)",
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
    "missing": "mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9",
}


@needs_root
@pytest.mark.parametrize("shared", SHELLS)
def test_a_bad_dev_shm_costs_one_line_at_most(shared: str) -> None:
    for outcome in world_in(SHELLS[shared], "work_hard"):
        assert outcome["exit_code"] == 0, outcome
        assert len(outcome["output"].splitlines()) <= 1, outcome["output"]


def work_with_little(rank: int, size: int, limit: str, room: int) -> str:
    if limit == "RLIMIT_AS":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + room, -1))
    else:
        resource.setrlimit(getattr(resource, limit), (room, room))
    dist.init_process_group(timeout=15)
    for length in (1, 5000, 50_000):
        array = np.ones(length)
        dist.all_reduce(array)
        assert (array == size).all()
    return str(dist.group.WORLD.transport)


@pytest.mark.parametrize(
    ("limit", "room"),
    [
        pytest.param("RLIMIT_AS", 4 << 20, marks=pytest.mark.slow),
        *[("RLIMIT_AS", room << 20) for room in (24, 64)],
        ("RLIMIT_FSIZE", 1 << 20),
        ("RLIMIT_FSIZE", 0),
    ],
)
def test_too_little_memory_falls_back_to_tcp_or_is_an_error_in_words(limit: str, room: int) -> None:
    with start(work_with_little, 2, args=(limit, room)) as world:
        outcomes = world.wait(25)
    for outcome in outcomes:
        assert outcome.exit_code in (0, 1), f"status {outcome.exit_code}: {outcome.output}"
        if limit == "RLIMIT_FSIZE" and room == 0:
            continue  # not even the test's own files can be written
        if outcome.exit_code == 0:
            assert len(outcome.output.splitlines()) <= 1, outcome.output
        else:
            assert isinstance(outcome.error, (dist.DistError, MemoryError, OSError)), outcome.traceback


def little_on_one_rank(rank: int, size: int) -> str:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    dist.init_process_group(timeout=15)
    array = np.ones(50_000)
    dist.all_reduce(array)
    assert (array == size).all()
    return str(dist.group.WORLD.transport)


def test_a_rank_without_room_uses_tcp_and_the_others_share_memory() -> None:
    with start(little_on_one_rank, 3) as world:
        outcomes = world.wait(25)
    assert all(outcome.ok for outcome in outcomes), [outcome.output + outcome.traceback for outcome in outcomes]
    assert [outcome.value for outcome in outcomes] == ["shared memory, tcp"] * 3
    assert all(len(outcome.output.splitlines()) <= 1 for outcome in outcomes)
    assert any("tcp" in outcome.output.lower() for outcome in outcomes), "somebody says that TCP is used, and why"


def insist_on_shared_memory(rank: int, size: int) -> str:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with pytest.raises(dist.DistError) as caught:
        dist.init_process_group(timeout=15)
    assert not dist.is_initialized()
    return str(caught.value)


def test_insisting_on_shared_memory_where_there_is_none_is_refused() -> None:
    texts = run(insist_on_shared_memory, 3, timeout=25, environment=on("shm"))
    assert all("shm" in text or "shared memory" in text for text in texts), texts


def refuse_an_unknown_transport(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="PROCGROUP_TRANSPORT"):
        dist.init_process_group(timeout=5)


def test_an_unknown_transport_is_refused() -> None:
    run(refuse_an_unknown_transport, 2, environment={"PROCGROUP_TRANSPORT": "pigeon"})


def start_without_a_network(rank: int, size: int) -> str:
    started = time.monotonic()
    with pytest.raises(dist.DistError) as caught:
        dist.init_process_group(timeout=4)
    assert time.monotonic() - started < 8
    return f"{type(caught.value).__name__}: {caught.value}"


@needs_root
def test_a_start_without_loopback_is_an_error_in_words() -> None:
    outcomes = world_in("true", "start_without_a_network", flags="-n")
    for outcome in outcomes:
        assert outcome["exit_code"] == 0, outcome["error"] + outcome["output"]
        assert "127.0.0.1" in outcome["value"], outcome["value"]


def work_for_ever(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    array = np.ones(300_000)
    while True:
        array[:] = 1
        dist.all_reduce(array)
        works: list[Any] = [dist.isend(array, (rank + 1) % size), dist.irecv(array, (rank - 1) % size)]
        for work in works:
            work.wait()
        print(".", end="", flush=True)


def kill_all(transport: str) -> None:
    with start(work_for_ever, 4, environment=on(transport)) as world:
        for rank in range(4):
            world.wait_for_output(rank, "...")
        for pid in world.pids:
            with contextlib.suppress(ProcessLookupError):  # it may have ended for the loss of one that was killed
                os.kill(pid, signal.SIGKILL)
        world.wait()


def what_is_there() -> dict[str, list[str]]:
    """Everything in the places where something could be left."""
    files = [str(path) for place in ("/dev/shm", tempfile.gettempdir(), "/run") for path in Path(place).rglob("*")]
    # Log directories of launchers and of benchmarks, which other tests start beside this one; none runs here.
    others = ("procgroup_", "procgroup-bench-")
    files += [str(path) for path in Path("/tmp").glob("*procgroup*") if not path.name.startswith(others)]
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    tcp = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = [fields[7] for fields in unix if len(fields) > 7 and not fields[7].startswith(f"@{PORT_NAME}")]
    listening = [fields[1] for fields in tcp if fields[3] == "0A"]
    return {"files": files, "sockets": sockets, "listening": listening}


def look_for_leftovers(transport: str) -> None:
    """The main program of a namespace that has all these places to itself."""
    exec(compile(LOOPBACK, "loopback", "exec"))
    run(leave_nothing, 2, environment=on(transport))  # so that multiprocessing's own files are there before
    before = what_is_there()
    kill_all(transport)

    def left() -> dict[str, list[str]]:
        return {place: sorted(set(there) - set(before[place])) for place, there in what_is_there().items()}

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not any(left().values()), 20)  # a killed process's sockets may close a moment later
    print(json.dumps(left()))


def leave_nothing(rank: int, size: int) -> None:
    dist.init_process_group(timeout=15)


@needs_root
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_when_all_ranks_are_killed(transport: str, tmp_path: Path) -> None:
    shell = f"export TMPDIR='{tmp_path}' && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run"
    program = (
        f"import sys; sys.path[:0] = [{str(RUN_WORLD.parents[1])!r}]; "
        f"from failures.test_surroundings import look_for_leftovers as look; "
        f"__name__ == '__main__' and look({transport!r})"
    )
    command = ["unshare", "-mn", "sh", "-c", f'{shell} && exec "{sys.executable}" -c "$0"', program]
    done = run_command(command, timeout=250)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"files": [], "sockets": [], "listening": []}
