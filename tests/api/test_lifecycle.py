"""From nothing to a group and back, in every wrong order too."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.api import default_group
from procgroup.backends import nccl_library
from procgroup.stores.hash import HashStore
from world import run_command

NOT_INITIALIZED = "Default process group has not been initialized, please make sure to call init_process_group."
ALONE: dict[str, Any] = {"rank": 0, "world_size": 1}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PROCGROUP_INIT_METHOD", "TORCH_DISTRIBUTED_INIT_METHOD", "TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def python(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return run_command([sys.executable, "-c", program])


@pytest.mark.parametrize(
    "call",
    [
        lambda: dist.get_rank(),
        lambda: dist.get_world_size(),
        lambda: dist.get_backend(),
        lambda: dist.get_process_group_ranks(None),
        lambda: dist.all_reduce(np.ones(1)),
        lambda: dist.reduce(np.ones(1), 0),
        lambda: dist.broadcast(np.ones(1), 0),
        lambda: dist.all_gather([np.ones(1)], np.ones(1)),
        lambda: dist.barrier(),
        lambda: dist.send(np.ones(1), 0),
        lambda: dist.isend(np.ones(1), 0),
        lambda: dist.recv(np.ones(1), 0),
        lambda: dist.irecv(np.ones(1), 0),
    ],
)
def test_a_call_before_init_says_what_is_missing(call: Any) -> None:
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == NOT_INITIALIZED


def test_a_second_init_is_refused_and_the_group_still_works() -> None:
    dist.init_process_group(**ALONE)
    with pytest.raises(ValueError, match="trying to initialize the default process group twice!"):
        dist.init_process_group(**ALONE)
    dist.barrier()


def test_init_after_destroy_works_many_times() -> None:
    for _ in range(50):
        dist.init_process_group(**ALONE)
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()


def test_destroying_is_idempotent_and_needs_no_group_argument() -> None:
    dist.init_process_group(**ALONE)
    world = dist.group.WORLD
    dist.destroy_process_group(world)
    dist.destroy_process_group(world)
    dist.destroy_process_group()


def test_destroying_what_never_was_is_an_assertion_error() -> None:
    done = python("import procgroup; procgroup.destroy_process_group()")
    assert done.stderr.endswith("AssertionError: Process group cannot be None: call init_process_group first.\n")


def test_destroying_something_else_is_refused() -> None:
    dist.init_process_group(**ALONE)
    with pytest.raises(ValueError, match="Invalid process group specified: 'world'"):
        dist.destroy_process_group("world")  # type: ignore[arg-type]


def test_a_destroyed_group_raises_in_every_call_and_still_knows_its_rank() -> None:
    dist.init_process_group(**ALONE)
    world = dist.group.WORLD
    dist.destroy_process_group()
    for call in (
        lambda: dist.all_reduce(np.ones(1), group=world),
        lambda: dist.broadcast(np.ones(1), 0, group=world),
        lambda: dist.barrier(world),
        lambda: dist.recv(np.ones(1), group=world),
        lambda: world.all_gather([np.ones(1)], np.ones(1)),
    ):
        with pytest.raises(dist.GroupDestroyed, match="Invalid process group specified: group 0 has been destroyed"):
            call()
    assert issubclass(dist.GroupDestroyed, ValueError)
    assert (dist.get_rank(world), dist.get_world_size(world)) == (0, 1)


@pytest.mark.parametrize(
    ("backend", "name", "config"),
    [
        (None, "gloo", "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "cpu:gloo"),
        ("gloo", "gloo", "cpu:gloo,cuda:gloo"),
        ("GLOO", "gloo", "cpu:gloo,cuda:gloo"),
        ("procgroup", "procgroup", "cpu:procgroup,cuda:procgroup"),
        ("cpu:gloo", "gloo", "cpu:gloo"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
    ],
)
def test_get_backend_answers_what_was_asked_and_transport_what_is_used(
    backend: str | None, name: str, config: str
) -> None:
    dist.init_process_group(backend, **ALONE)
    assert (dist.get_backend(), dist.get_backend_config()) == (name, config)
    assert dist.group.WORLD.transport == "shared memory"


@pytest.mark.parametrize(
    ("backend", "error", "text"),
    [
        ("nccl", dist.DistBackendError, "The backend 'nccl' needs"),
        ("ucc", dist.DistBackendError, "'ucc' .* is not in this version"),
        ("cpu:nccl", ValueError, "'nccl' in 'cpu:nccl' is for cuda, not cpu"),
        ("cuda:nccl", dist.DistBackendError, "The backend 'nccl' needs"),
        ("foo", ValueError, "Unknown backend type 'foo'"),
        ("", ValueError, "Unknown backend type ''"),
        ("cpu:gloo,cuda:foo", ValueError, "Unknown backend type 'foo'"),
        ("cpu:gloo,cpu:gloo", ValueError, "Invalid backend 'cpu:gloo,cpu:gloo'"),
        ("cpu:", ValueError, "Invalid backend 'cpu:'"),
        ("cpu:gloo,", ValueError, "Invalid backend"),
        (3, TypeError, "`backend` to be a str, got 3"),
    ],
)
def test_a_wrong_backend_is_refused_and_leaves_nothing_behind(backend: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        dist.init_process_group(backend, **ALONE)
    assert not dist.is_initialized()
    dist.init_process_group(**ALONE)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"timeout": "x"}, TypeError, "expected timeout to be a datetime.timedelta or a number of seconds, got 'x'"),
        ({"timeout": -1}, ValueError, "at least 0 seconds"),
        ({"timeout": timedelta(seconds=-1)}, ValueError, "at least 0 seconds"),
        ({"timeout": float("nan")}, ValueError, "at least 0 seconds"),
        ({"pg_options": 3}, TypeError, "Expected pg_options argument to be a dict"),
        ({"pg_options": {"timeouts": 3}}, ValueError, r"unknown names \['timeouts'\]; expected timeout, init_method_"),
        ({"pg_options": {"init_method_timeout": "x"}}, TypeError, "got 'x'"),
        ({"pg_options": {"deterministic": "yes"}}, ValueError, "None or 'order', got 'yes'"),
        ({"init_method": 3}, TypeError, "`url` must be a string"),
        ({"init_method": "foo://"}, RuntimeError, "No rendezvous handler for foo://"),
        ({"rank": "0"}, TypeError, "`rank` must be an integer"),
        ({"rank": 1}, ValueError, "rank must be between 0 and 0"),
    ],
)
def test_a_wrong_argument_of_init_is_refused(keywords: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        dist.init_process_group(**(ALONE | keywords))
    assert not dist.is_initialized()


@pytest.mark.parametrize("timeout", [5, 5.0, timedelta(seconds=5)])
def test_timeouts_are_timedeltas_or_seconds(timeout: Any) -> None:
    dist.init_process_group(timeout=timeout, **ALONE)
    assert dist.group.WORLD.timeout == timedelta(seconds=5)
    assert dist.group.WORLD.store.timeout == timedelta(seconds=5)


def test_a_program_may_state_that_it_relies_on_rank_order() -> None:
    dist.init_process_group(pg_options={"deterministic": "order"}, **ALONE)
    assert dist.is_initialized()


def test_pg_options_may_be_a_dict_and_the_keyword_wins() -> None:
    dist.init_process_group(pg_options={"timeout": 7, "init_method_timeout": timedelta(seconds=1)}, **ALONE)
    assert dist.group.WORLD.timeout == timedelta(seconds=7)
    dist.destroy_process_group()
    dist.init_process_group(timeout=9, pg_options={"timeout": 7}, **ALONE)
    assert dist.group.WORLD.timeout == timedelta(seconds=9)


def test_a_huge_timeout_is_taken() -> None:
    dist.init_process_group(timeout=timedelta.max, **ALONE)
    dist.barrier()


def test_store_and_init_method_together_are_refused() -> None:
    with pytest.raises(AssertionError, match="Cannot specify both init_method and store. Leave one out"):
        dist.init_process_group(store=HashStore(), init_method="env://", **ALONE)


def test_a_store_needs_a_place_and_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = HashStore()
    with pytest.raises(AssertionError, match="world_size must be positive if using store, got -1"):
        dist.init_process_group(store=store, rank=0)
    with pytest.raises(AssertionError, match="rank must be non-negative if using store, got -1"):
        dist.init_process_group(store=store, world_size=1)
    with pytest.raises(ValueError, match="rank must be between 0 and 0"):
        dist.init_process_group(store=store, world_size=1, rank=1)
    dist.init_process_group(store=store, **ALONE)
    dist.group.WORLD.store.set("key", "value")
    assert store.get("default_pg/0/key") == b"value"
    dist.destroy_process_group()
    assert store.get("default_pg/0/key") == b"value", "the user's store stays open"


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(TypeError, match="store"):
        dist.init_process_group(store={}, **ALONE)  # type: ignore[arg-type]
    assert not dist.is_initialized()


def test_keywords_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("gloo", world_size=1)
    assert dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("ours", "torchs", "given", "used"),
    [
        ("one://", "two://", None, "one"),
        ("", "two://", None, "two"),
        (None, "two://", None, "two"),
        ("one://", None, None, "one"),
        ("one://", "two://", "three://", "three"),
    ],
)
def test_the_default_init_method_comes_from_the_environment(
    ours: str | None, torchs: str | None, given: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PROCGROUP_INIT_METHOD", ours), ("TORCH_DISTRIBUTED_INIT_METHOD", torchs)):
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"No rendezvous handler for {used}://"):
        dist.init_process_group(init_method=given, **ALONE)


def test_a_file_can_be_the_init_method(tmp_path: Path) -> None:
    for _ in range(3):
        dist.init_process_group(init_method=f"file://{tmp_path}/meeting", **ALONE)
        dist.group.WORLD.store.set("key", "value")
        dist.destroy_process_group()


def test_group_name_and_device_id_are_taken() -> None:
    dist.init_process_group(group_name="mine", device_id=0, **ALONE)
    assert dist.group.WORLD.group_name == "0"


def test_a_thread_can_be_a_rank_of_its_own() -> None:
    dist.init_process_group(**ALONE)
    seen: list[bool] = []

    def be_a_rank() -> None:
        seen.append(dist.is_initialized())
        default_group.use_own_slot()
        seen.append(dist.is_initialized())
        dist.init_process_group(**ALONE)
        seen.append(dist.group.WORLD is not world)
        dist.destroy_process_group()

    world = dist.group.WORLD
    thread = threading.Thread(target=be_a_rank)
    thread.start()
    thread.join(10)
    assert seen == [True, False, True]
    assert dist.group.WORLD is world


def test_what_is_available() -> None:
    assert dist.is_available()
    assert dist.is_gloo_available()
    assert dist.is_mpi_available() == (importlib.util.find_spec("mpi4py") is not None)
    assert dist.is_nccl_available() == nccl_library.is_installed()
    assert not any((dist.is_ucc_available(), dist.is_xccl_available()))
    assert dist.is_backend_available("procgroup")
    assert not dist.is_backend_available("foo")
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    assert dist.get_default_backend_for_device("cuda:1") == "nccl"
    for device in ("abacus", 3, None):
        with pytest.raises(ValueError, match="Default backend not registered for device"):
            dist.get_default_backend_for_device(device)


def test_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_torchelastic_launched()
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not in the environment. Consider passing fallback_rank"):
        dist.get_node_local_rank()
    assert dist.get_node_local_rank(3) == 3
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert dist.get_node_local_rank(3) == 2
    assert dist.is_torchelastic_launched()


def test_an_uncaught_exception_is_prefixed_with_the_rank() -> None:
    done = python("import procgroup as d; d.init_process_group(rank=0, world_size=1); raise KeyError('oops')")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert all(line.startswith("[rank0]: ") for line in lines)
    assert lines[-1] == "[rank0]: KeyError: 'oops'"


def test_the_former_excepthook_comes_back() -> None:
    former = sys.excepthook
    dist.init_process_group(**ALONE)
    assert sys.excepthook is not former
    dist.destroy_process_group()
    assert sys.excepthook is former


def test_an_excepthook_that_the_user_set_stays() -> None:
    former = sys.excepthook
    dist.init_process_group(**ALONE)
    try:
        sys.excepthook = mine = lambda *_: None
        dist.destroy_process_group()
        assert sys.excepthook is mine
    finally:
        sys.excepthook = former


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "d.barrier(async_op=True)",
        "d.destroy_process_group()",
        "import atexit; atexit.register(d.destroy_process_group)",
    ],
)
def test_a_program_that_ends_leaves_no_words(ending: str) -> None:
    done = python(f"import procgroup as d, numpy as n; d.init_process_group(rank=0, world_size=1); {ending}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FORK = """
import os, sys, numpy
import procgroup as dist
dist.init_process_group(rank=0, world_size=1)
child = os.fork()
if child == 0:
    assert (dist.get_rank(), dist.get_world_size(), dist.is_initialized()) == (0, 1, True)
    try:
        dist.all_reduce(numpy.ones(1))
    except dist.ForkedProcessError as error:
        print(error)
    dist.init_process_group(rank=0, world_size=1)
    dist.all_reduce(numpy.ones(1))
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
dist.all_reduce(numpy.ones(1))
print("the parent is unharmed")
"""


def test_a_forked_child_is_told_and_can_begin_anew() -> None:
    done = python(FORK)
    assert (done.returncode, done.stderr) == (0, "")
    assert "process group 0 cannot be used in a forked child of the process that made it" in done.stdout
    assert "the parent is unharmed" in done.stdout


@pytest.mark.torch
def test_the_texts_of_common_mistakes_begin_as_torchs() -> None:
    torch_distributed = pytest.importorskip("torch.distributed")
    for call in (
        lambda package: package.get_rank(),
        lambda package: package.get_world_size(),
        lambda package: package.init_process_group("gloo", init_method="env://", store=package.HashStore()),
        lambda package: package.init_process_group("gloo", store=package.HashStore()),
        lambda package: package.init_process_group("gloo", store=package.HashStore(), world_size=2),
        lambda package: package.get_node_local_rank(),
    ):
        raised = []
        for package in (torch_distributed, dist):
            with pytest.raises(Exception) as caught:
                call(package)
            raised.append((caught.type, str(caught.value)))
        (kind, text), (our_kind, our_text) = raised
        assert our_kind is kind and our_text.startswith(text)
