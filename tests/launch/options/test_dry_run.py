"""--dry-run: what would be started on this node, and where each value comes from."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from world import free_port

SECRET = "5ec7e7" * 8


class Shown:
    """What a dry run has printed: the lines of each paragraph, by the beginning of its first line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.paragraphs = {part.splitlines()[0]: part.splitlines()[1:] for part in text.split("\n\n")}

    def line(self, name: str, paragraph: str = "each rank") -> tuple[str, ...]:
        """Return the value and the source of a variable that a paragraph shows once."""
        title = next(title for title in self.paragraphs if title.startswith(paragraph))
        [found] = [line for line in self.paragraphs[title] if line.split()[0] == name]
        return tuple(re.split(r"\s{2,}", found.strip())[1:])

    def head(self, name: str) -> list[str]:
        """Return what follows a word at the top, as often as it is there."""
        before = self.text.partition("\n\neach rank")[0]
        return [line.split(maxsplit=1)[1] for line in before.splitlines() if line.startswith(f"  {name} ")]


@pytest.fixture
def dry_run(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def run(*flags: str, arguments: tuple[str, ...] = (), environment: dict[str, str] | None = None) -> Shown:
        source = f"open({str(launcher.directory / 'started')!r}, 'w')"
        done = launcher.run(source, "--dry-run", *flags, arguments=arguments, environment=environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert not (launcher.directory / "started").exists()
        return Shown(done.stdout)

    return run


def test_every_variable_that_a_rank_gets_is_shown_with_its_source(dry_run: Any) -> None:
    given = {"PET_ROLE": "trainer", "PROCGROUP_MAX_RESTARTS": "3", "PYTHONFAULTHANDLER": "0", "OMP_NUM_THREADS": "5"}
    shown = dry_run("-n", "2", "--rdzv-id", "job-7", "--master-port", str(port := free_port()), environment=given)
    assert shown.line("WORLD_SIZE") == ("2", "--nproc-per-node")
    assert shown.line("MASTER_ADDR") == ("127.0.0.1", "default")
    assert shown.line("MASTER_PORT") == (str(port), "--master-port")
    assert shown.line("ROLE_NAME") == ("trainer", "PET_ROLE")
    assert shown.line("TORCHELASTIC_MAX_RESTARTS") == ("3", "PROCGROUP_MAX_RESTARTS")
    assert shown.line("TORCHELASTIC_RUN_ID") == ("job-7", "--rdzv-id")
    assert shown.line("PYTHONFAULTHANDLER") == ("0", "environment")
    assert shown.line("OMP_NUM_THREADS") == ("5", "environment")
    assert shown.line("GROUP_RANK") == ("0", "default")
    for rank in range(2):
        title = f"rank {rank}, local rank {rank}, on {socket.gethostname()}"
        assert shown.line("RANK", title) == (str(rank), "--nproc-per-node")


def test_all_that_the_launcher_adds_to_a_rank_s_environment_was_shown(dry_run: Any, launcher: Any) -> None:
    shown = dry_run("--replace-gloo", "--replace-nccl")
    found = (
        launcher.run("import os; print(*os.environ)", "--replace-gloo", "--replace-nccl")
        .stdout.removeprefix("[rank 0] ")
        .split()
    )
    added = set(found) - set(os.environ)
    assert {"RANK", "MASTER_PORT", "PROCGROUP_REPLACE_GLOO", "PROCGROUP_REPLACE_NCCL"} <= added
    assert {name for name in added if f"\n  {name} " not in shown.text} == set()


def test_each_rank_s_command_is_shown_where_they_differ(dry_run: Any) -> None:
    shown = dry_run("-n", "2", "-m", "--run-path", arguments=("a b", "--out=${local_rank}"))
    assert shown.head("command")[0].endswith("script.py 'a b' '--out=${local_rank}'")
    assert shown.line("command", "rank 1,")[0].endswith("script.py 'a b' --out=1")


def test_secrets_are_not_shown(dry_run: Any) -> None:
    shown = dry_run(environment={"PROCGROUP_JOB_KEY": SECRET})
    assert SECRET not in shown.text
    assert shown.line("PROCGROUP_JOB_KEY") == ("(a secret, not shown)", "environment")
    assert dry_run().line("PROCGROUP_JOB_KEY") == ("(a secret, not shown)", "random")


def test_cores_and_gpus_of_each_rank_are_shown(dry_run: Any) -> None:
    given = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    shown = dry_run("-n", "2", "--gpus", "0,2", "--virtual-local-rank", "--bind", "cores", environment=given)
    assert shown.line("LOCAL_RANK") == ("0", "--nproc-per-node, --virtual-local-rank")
    assert shown.line("CUDA_VISIBLE_DEVICES", "rank 1,") == ("6", "--gpus, --virtual-local-rank")
    assert shown.line("CPUs", "rank 1,")[1] == "--numa-binding"
    assert "note: CUDA_VISIBLE_DEVICES=4,5,6 becomes 4,6" in shown.text


def test_of_one_node_this_one_hosts_the_store(dry_run: Any) -> None:
    [store] = dry_run().head("store")
    assert store == "at 127.0.0.1, port assigned at start, hosted by this node: can be bound here"


def test_a_port_that_is_taken_is_seen(dry_run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        [store] = dry_run("--master-port", str(taken.getsockname()[1])).head("store")
    assert store.endswith("hosted by this node: cannot be bound here: Address already in use")


@pytest.mark.parametrize(("node_rank", "host", "rank"), [("0", "this node", "0"), ("1", "node 0", "assigned at start")])
def test_of_a_fixed_number_of_nodes_node_0_hosts_the_store(dry_run: Any, node_rank: str, host: str, rank: str) -> None:
    port = str(free_port())
    shown = dry_run("--nnodes", "2", "--node-rank", node_rank, "--master-port", port)
    assert shown.head("store") == [f"at 127.0.0.1:{port}, hosted by {host}: can be bound here"]
    assert shown.line("GROUP_RANK")[0] == node_rank
    assert shown.line("RANK")[0] == rank
    assert shown.line("WORLD_SIZE") == ("assigned at start",)
    assert shown.line("MASTER_PORT") == (port, "--master-port")


def test_of_an_elastic_job_the_ranks_are_assigned_at_start(dry_run: Any) -> None:
    endpoints = f"192.0.2.7,localhost:{free_port()}"
    shown = dry_run("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoints, "--node-rank", "0")
    away, here = shown.head("store")
    assert away == "at 192.0.2.7:29400, hosted by the node that owns this address: no address of this host"
    assert here.endswith("hosted by this node: can be bound here")
    assert "\n\nrank assigned at start, local rank 0, on " in shown.text
    for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert shown.line(name) == ("assigned at start",)
    assert "note: --node-rank has no effect with --rdzv-backend c10d" in shown.text


def test_the_file_at_which_nodes_meet_is_named_and_not_made(dry_run: Any, tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    assert dry_run("--rdzv-backend", "file", "--rdzv-endpoint", str(path)).head("store") == [f"the file {path}"]
    assert not path.exists()


def test_a_program_that_does_not_exist_is_refused_as_at_a_start(launcher: Any) -> None:
    done = launcher.run("", "--dry-run", "-m", "--no-python")
    assert done.returncode == 2
