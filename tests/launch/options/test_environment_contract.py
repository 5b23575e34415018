"""The environment variables of a rank, and their sources."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from procgroup.cluster.control_group import usable_cores

SHOW = """
    import json, os, sys
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank" + os.environ["RANK"])
    with open(path, "w") as file:
        json.dump({"environment": dict(os.environ), "arguments": sys.argv[1:]}, file)
"""


def environments(directory: Path, ranks: int) -> list[dict[str, str]]:
    return [json.loads((directory / f"rank{rank}").read_text())["environment"] for rank in range(ranks)]


def test_every_variable_of_the_contract_is_set(launcher: Any) -> None:
    done = launcher.run(SHOW, "--nproc-per-node", "3", "--rdzv-id", "job-7", "--role", "trainer")
    assert done.returncode == 0, done.stderr
    for rank, found in enumerate(environments(launcher.directory, 3)):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "trainer",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "job-7",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "PROCGROUP_REPORT_SOCKET": "",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        assert {name: found.get(name) for name in expected} == expected
        assert found["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_0/{rank}/error.json")
        assert found["PROCGROUP_STORE"].startswith("127.0.0.1:")
        assert found["MASTER_PORT"] != found["PROCGROUP_STORE"].partition(":")[2]
        assert len(bytes.fromhex(found["PROCGROUP_JOB_KEY"])) == 32


def test_ranks_share_the_key_and_jobs_do_not(launcher: Any) -> None:
    keys = set()
    for _ in range(2):
        assert launcher.run(SHOW, "--nproc-per-node", "2").returncode == 0
        first, second = environments(launcher.directory, 2)
        assert first["PROCGROUP_JOB_KEY"] == second["PROCGROUP_JOB_KEY"]
        assert first["TORCHELASTIC_RUN_ID"] == second["TORCHELASTIC_RUN_ID"]
        keys.add(first["PROCGROUP_JOB_KEY"])
    assert len(keys) == 2


def test_the_key_stands_in_no_command_line(launcher: Any) -> None:
    source = """
        import os, pathlib
        key = os.environ["PROCGROUP_JOB_KEY"]
        for pid in (os.getpid(), os.getppid()):
            assert key not in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    """
    done = launcher.run(source)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [2, 7])
def test_threads_per_rank_follow_the_usable_cores_and_are_said_once(
    launcher: Any, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = launcher.run(SHOW, "--nproc-per-node", str(ranks))
    threads = str(max(1, usable_cores() // ranks))
    assert [found["OMP_NUM_THREADS"] for found in environments(launcher.directory, ranks)] == [threads] * ranks
    assert done.stderr.count("OMP_NUM_THREADS") == 1


def test_a_thread_count_of_the_user_wins_in_silence(launcher: Any) -> None:
    done = launcher.run(SHOW, "--nproc-per-node", "2", environment={"OMP_NUM_THREADS": "5"})
    assert [found["OMP_NUM_THREADS"] for found in environments(launcher.directory, 2)] == ["5", "5"]
    assert done.stderr == ""


def test_variables_of_the_user_that_are_replaced_are_named(launcher: Any) -> None:
    done = launcher.run(SHOW, environment={"MASTER_ADDR": "10.0.0.1", "RANK": "3"})
    assert "RANK, MASTER_ADDR of the environment are replaced" in done.stderr
    assert environments(launcher.directory, 1)[0]["MASTER_ADDR"] == "127.0.0.1"


def test_a_launcher_may_be_started_by_a_rank_of_another_job(launcher: Any) -> None:
    outer = {"TORCHELASTIC_RUN_ID": "outer", "PROCGROUP_JOB_KEY": "ab" * 32, "PROCGROUP_STORE_KEY": "cd" * 32}
    source = "import procgroup as dist; dist.init_process_group(); print(dist.get_world_size())"
    for flags in ((), ("--rdzv-id", "x" * 100)):
        done = launcher.run(source, "--nproc-per-node", "2", *flags, environment=outer)
        assert sorted(done.stdout.splitlines()) == ["[rank 0] 2", "[rank 1] 2"], done.stderr


def test_faulthandler_setting_of_the_user_wins(launcher: Any) -> None:
    launcher.run(SHOW, environment={"PYTHONFAULTHANDLER": "0"})
    assert environments(launcher.directory, 1)[0]["PYTHONFAULTHANDLER"] == "0"


def test_other_variables_pass_unchanged(launcher: Any) -> None:
    launcher.run(SHOW, environment={"MINE": "ä = 1", "CUDA_VISIBLE_DEVICES": "1,0"})
    found = environments(launcher.directory, 1)[0]
    assert (found["MINE"], found["CUDA_VISIBLE_DEVICES"]) == ("ä = 1", "1,0")


def test_arguments_reach_the_script_as_they_are(launcher: Any) -> None:
    given = ("--nnodes=3", "-m", "--", "a b", "", "rank-${local_rank}", "$HOME")
    done = launcher.run(SHOW, "--nproc-per-node", "2", arguments=given)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((launcher.directory / f"rank{rank}").read_text())["arguments"]
        assert found == ["--nnodes=3", "-m", "--", "a b", "", f"rank-{rank}", "$HOME"]


def test_a_master_port_that_is_taken_is_said_before_anything_starts(launcher: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = launcher.run("print('started')", "--master-port", port)
    assert done.returncode == 1
    assert port in done.stderr
    assert "Traceback" not in done.stderr
    assert "started" not in done.stdout


@pytest.mark.torch
def test_a_program_of_stock_pytorch_meets_at_the_port_that_the_launcher_keeps(launcher: Any) -> None:
    source = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", total.item())
    dist.destroy_process_group()  # stock Gloo's threads may abort a process that ends without
    """
    done = launcher.run(source, "--nproc-per-node", "2", timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2


def test_the_master_port_is_free_for_rank_0_and_for_nobody_else(launcher: Any) -> None:
    source = """
    import os, socket
    port = int(os.environ["MASTER_PORT"])
    assert all(socket.create_server(("127.0.0.1", 0)).getsockname()[1] != port for _ in range(500))
    if os.environ["RANK"] == "0":
        socket.create_server(("127.0.0.1", port)).close()
        socket.create_server(("", port)).close()
        print("bound")
    """
    done = launcher.run(source, "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    assert "bound" in done.stdout


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_is_to_be_replaced_is_passed_on(launcher: Any, backend: str) -> None:
    source = f"import os; print(os.environ.get('PROCGROUP_REPLACE_{backend.upper()}'))"
    assert "1" in launcher.run(source, f"--replace-{backend}").stdout
    assert "None" in launcher.run(source).stdout
