"""procgroup run --hosts: ranks on "two hosts", which are two addresses of a real OpenSSH server on this machine."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import procgroup
import ssh_server
from documentation.page_programs import ROOT, blocks
from procgroup.cluster.addresses import Host, read_hostfile
from procgroup.launch import flags
from procgroup.launch.hosts.hosts_plan import Ssh, plan_hosts
from world import run_command

Gone = Callable[[list[int]], None]

SUM = """
    import os, sys
    import numpy as np
    import procgroup as dist
    dist.init_process_group()
    number = np.array([dist.get_rank() + 1])
    dist.all_reduce(number)
    print("sum", number[0], "node", os.environ["GROUP_RANK"], *sys.argv[1:])
    print("note", file=sys.stderr)
    dist.destroy_process_group()
"""
SLEEP = """
    import os, time
    print("pid", os.getpid(), "agent", os.getppid(), flush=True)
    time.sleep(60)
"""
RESIST = """
    import os, signal, time
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print("pid", os.getpid(), "agent", os.getppid(), flush=True)
    while True:
        time.sleep(1)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_server.SshServer]:
    if lack := ssh_server.lacks():
        pytest.skip(lack)
    with ssh_server.running(tmp_path_factory.mktemp("ssh")) as running:
        yield running


@pytest.fixture
def on_hosts(server: ssh_server.SshServer) -> Callable[..., tuple[str, ...]]:
    """The flags that start ranks on hosts of the server."""
    return lambda hosts="host1:2,host2:2", *more: ("--hosts", hosts, "--ssh", server.ssh, *more)


def program(folder: Path, *lines: str) -> str:
    """Write an executable shell script; return its path."""
    path = folder / "program.sh"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def test_ranks_on_two_hosts_are_numbered_in_the_hosts_order_and_their_output_comes_back(
    launcher: Any, on_hosts: Any
) -> None:
    done = launcher.run(SUM, *on_hosts("host2:1,host1:3"), arguments=("a b", "it's", '$HOME "x"'))
    assert done.returncode == 0, done.stderr
    tail = 'a b it\'s $HOME "x"'
    prefixes = ["[rank 0 host2]", *(f"[rank {rank} host1]" for rank in range(1, 4))]
    expected = [f"{prefix} sum 10 node {min(rank, 1)} {tail}" for rank, prefix in enumerate(prefixes)]
    assert sorted(done.stdout.splitlines()) == expected
    assert sorted(line for line in done.stderr.splitlines() if "note" in line) == [
        f"{prefix} note" for prefix in prefixes
    ]


def test_the_first_failure_of_all_hosts_is_reported_once_and_its_status_is_the_commands(
    launcher: Any, on_hosts: Any
) -> None:
    source = """
        import os, sys, time
        if os.environ["RANK"] == "3":
            sys.exit(7)
        time.sleep(60)
    """
    done = launcher.run(source, *on_hosts())
    assert done.returncode == 7, done.stderr
    assert done.stderr.count("failed first") == 1
    assert re.search(r"rank 3 \(host2, pid \d+\) failed first: exit code 7", done.stderr)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_command_ends_the_ranks_of_all_hosts(
    start_launcher: Any, on_hosts: Any, gone: Gone, number: signal.Signals
) -> None:
    running = start_launcher(SLEEP, *on_hosts())
    running.wait_for("pid", 4)
    running.process.send_signal(number)
    assert running.process.wait(timeout=20) == 128 + number
    gone([*running.pids(), *running.pids("agent")])
    # One agent may have ended its ranks already because the other has left.
    ended = {f"procgroup run: {name}: {number.name}: ending 2 ranks" for name in ("host1", "host2")}
    assert ended & set(running.stderr.splitlines())


@pytest.mark.parametrize(
    "source", [SLEEP, pytest.param(RESIST, marks=pytest.mark.slow)], ids=["ranks end", "ranks resist"]
)
def test_the_death_of_the_command_ends_agents_and_ranks_within_seconds(
    start_launcher: Any, on_hosts: Any, gone: Gone, source: str
) -> None:
    running = start_launcher(source, *on_hosts())
    running.wait_for("pid", 4)
    running.process.kill()
    gone([*running.pids(), *running.pids("agent")])


def test_a_host_that_refuses_connections_ends_the_job_before_any_rank_begins(launcher: Any, on_hosts: Any) -> None:
    done = launcher.run("print('begun', flush=True)", *on_hosts("host1:2,nowhere:2"))
    assert done.returncode == 1
    assert "cannot reach nowhere by ssh: ssh: connect to host 127.0.0.1 port" in done.stderr
    assert "Connection refused" in done.stderr
    assert "begun" not in done.stdout


def test_a_host_that_never_answers_ends_the_job_in_time(launcher: Any, tmp_path: Path) -> None:
    if lack := ssh_server.lacks():
        pytest.skip(lack)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ssh = f"ssh -F /dev/null -p {silent.getsockname()[1]}"
        done = launcher.run("", "--hosts", "127.0.0.1:1", "--ssh", ssh, "--ssh-timeout", "1")
    assert done.returncode == 1
    assert "no agent within 1 s (--ssh-timeout) on 127.0.0.1" in done.stderr


def test_ssh_never_asks_for_a_password(launcher: Any, on_hosts: Any, server: ssh_server.SshServer) -> None:
    flags = ("--hosts", "host1:1", "--ssh", f"{server.ssh} -o IdentityFile=none -o PreferredAuthentications=password")
    done = launcher.run("", *flags)
    assert done.returncode == 1
    assert "cannot reach host1 by ssh: " in done.stderr and "Permission denied" in done.stderr


def test_a_host_without_the_interpreter_is_named(launcher: Any, on_hosts: Any) -> None:
    done = launcher.run("", *on_hosts("host1:1", "--remote-python", "/no/python"))
    assert done.returncode == 1
    assert (
        "host1 has no interpreter /no/python that can be executed: name the one there by --remote-python" in done.stderr
    )


def test_a_host_without_procgroup_is_named(launcher: Any, on_hosts: Any, tmp_path: Path) -> None:
    python = program(tmp_path, f'exec {sys.executable} -I -S "$@"')
    done = launcher.run("", *on_hosts("host1:1", "--remote-python", python))
    assert done.returncode == 1
    assert f"{python} on host1 has no procgroup: install it there" in done.stderr


def test_a_host_with_another_version_of_procgroup_is_named(launcher: Any, on_hosts: Any, tmp_path: Path) -> None:
    installed = Path(procgroup.__file__).parent
    if installed.parent.name != "site-packages":
        pytest.skip("procgroup is installed in place, where its own finder comes before PYTHONPATH")
    older = shutil.copytree(installed, tmp_path / "older" / "procgroup", ignore=shutil.ignore_patterns("__pycache__"))
    init = older / "__init__.py"
    init.write_text(init.read_text().replace(f'__version__ = "{procgroup.__version__}"', '__version__ = "0.0.1"'))
    python = program(tmp_path, f'PYTHONPATH={older.parent} exec {sys.executable} "$@"')
    done = launcher.run("", *on_hosts("host1:1", "--remote-python", python))
    assert done.returncode == 1
    assert f"host1 has procgroup 0.0.1, and here it is {procgroup.__version__}: install the same one" in done.stderr


def test_what_a_host_shows_at_login_is_kept_from_the_output_of_the_ranks(
    launcher: Any, on_hosts: Any, tmp_path: Path
) -> None:
    python = program(tmp_path, "echo welcome", f'exec {sys.executable} "$@"')
    done = launcher.run("print('done')", *on_hosts("host1:1", "--remote-python", python))
    assert done.stdout == "[rank 0] done\n"
    assert "[host1] welcome\n" in done.stderr


def test_a_script_that_is_missing_on_a_host_is_named_before_any_rank_begins(
    start_launcher: Any, launcher: Any, on_hosts: Any, tmp_path: Path
) -> None:
    done = launcher.run("", *on_hosts("host1:1", "--chdir", str(tmp_path), "there_is_none.py"))
    assert done.returncode == 1
    assert f"there is no script 'there_is_none.py' in {tmp_path}" in done.stderr
    assert "the agent on host1 ended with status 2 before it was ready" in done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--chdir", "/no/directory", "cannot go to the directory /no/directory: No such file or directory"),
        ("--rdzv-endpoint", "127.0.0.1:{taken}", "cannot use port {taken} of --rdzv-endpoint: Address already in use"),
    ],
)
def test_what_a_host_cannot_provide_is_named_before_any_rank_begins(
    launcher: Any, on_hosts: Any, flag: str, value: str, why: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        done = launcher.run("", *on_hosts("host1:1", flag, value.format(taken=taken)))
    assert done.returncode == 1
    assert f"[host1] procgroup run: {why.format(taken=taken)}" in done.stderr


def test_a_host_that_is_lost_ends_the_job_and_is_named(
    start_launcher: Any, on_hosts: Any, server: ssh_server.SshServer, gone: Gone
) -> None:
    running = start_launcher(SLEEP, *on_hosts("host1:1,host2:1"))
    running.wait_for("pid", 2)
    (line,) = (line for line in running.stdout.splitlines() if line.startswith("[rank 1 host2]"))
    agent = psutil.Process(int(line.split("agent ")[1]))
    session = next(parent for parent in agent.parents() if parent in server.sessions())
    assert session.name().startswith("sshd")
    session.kill()
    # The agent that lives on behind the lost connection takes that for SIGHUP, and the job ends with it.
    assert running.process.wait(timeout=20) == 128 + signal.SIGHUP
    assert "procgroup run: ssh to host2 ended with status 255: the connection was lost, or" in running.stderr
    gone([*running.pids(), *running.pids("agent")])


def test_the_ranks_get_the_variables_and_the_directory_that_they_are_to_get(
    launcher: Any, server: ssh_server.SshServer, tmp_path: Path
) -> None:
    source = """
        import json, os
        names = ("OMP_NUM_THREADS", "PROCGROUP_TRANSPORT", "PROCGROUP_HOSTS", "A", "B", "SECRET")
        print(json.dumps([os.getcwd(), *map(os.environ.get, names)]), flush=True)
    """
    done = launcher.run(
        source,
        *("--ssh", server.ssh, "--chdir", str(tmp_path), "--export", "A,B=2"),
        environment={
            "PROCGROUP_HOSTS": "host2:1",
            "OMP_NUM_THREADS": "3",
            "PROCGROUP_TRANSPORT": "tcp",
            "A": "1, one",
            "SECRET": "x",
        },
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.removeprefix("[rank 0] ")) == [str(tmp_path), "3", "tcp", None, "1, one", "2", None]


def test_the_jobs_key_is_in_no_command_line(launcher: Any, on_hosts: Any) -> None:
    source = """
        import os, psutil
        key = os.environ["PROCGROUP_JOB_KEY"]
        lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        assert any("procgroup.launch.remote_agent" in line for line in lines)
        print("key", len(key), "shown", any(key in line for line in lines), flush=True)
    """
    done = launcher.run(source, *on_hosts("host1:1"))
    assert done.stdout == "[rank 0] key 64 shown False\n", done.stderr


def test_localhost_needs_no_ssh(launcher: Any) -> None:
    done = launcher.run(SUM, "--hosts", "localhost:2", "--ssh", "/no/ssh")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] sum 3 node 0 ".rstrip() for rank in range(2)]


def test_the_line_of_the_documentation_starts_a_job(server: ssh_server.SshServer, tmp_path: Path) -> None:
    page = ROOT / "docs" / "several_hosts.md"
    (tmp_path / "train.py").write_text(next(block.text for block in blocks(page) if block.language == "python"))
    text = next(block.text for block in blocks(page) if block.text.startswith("login$"))
    line, *expected = text.removeprefix("login$ procgroup ").splitlines()
    command = [sys.executable, "-m", "procgroup", *line.split()]
    done = run_command(command, directory=tmp_path, environment={"PROCGROUP_SSH": server.ssh})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == expected


def test_the_file_of_the_documentation_is_read(tmp_path: Path) -> None:
    page = ROOT / "docs" / "several_hosts.md"
    text = next(block.text for block in blocks(page) if block.text.startswith("# hosts.txt"))
    (tmp_path / "hosts.txt").write_text(text)
    assert read_hostfile(str(tmp_path / "hosts.txt")) == [Host("node1", 4), Host("node2", 4), Host("user@node3")]


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_ranks_that_write_on(server: ssh_server.SshServer, launcher: Any) -> None:
    script = launcher.script("while True: print('more', flush=True)")
    line = f"{sys.executable} -m procgroup run --hosts host1:2 {script} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = run_command(["bash", "-c", line], environment={"PROCGROUP_SSH": server.ssh})
    shown, status = done.stdout.splitlines()
    assert shown.endswith("more")
    assert int(status) != 0


@pytest.mark.slow
def test_localhost_and_another_host_meet(launcher: Any, on_hosts: Any) -> None:
    done = launcher.run(SUM, *on_hosts("localhost:1,host2:1"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0 localhost] sum 3 node 0", "[rank 1 host2] sum 3 node 1"]


@pytest.mark.slow
def test_a_host_that_is_lost_ends_a_job_that_might_start_again(start_launcher: Any, on_hosts: Any, gone: Gone) -> None:
    running = start_launcher(SLEEP, *on_hosts("host1:1,host2:1", "--max-restarts", "3", "--shutdown-timeout", "1"))
    running.wait_for("pid", 2)
    (line,) = (line for line in running.stdout.splitlines() if line.startswith("[rank 1 host2]"))
    psutil.Process(int(line.split("agent ")[1])).kill()
    assert running.process.wait(timeout=30) == 255
    assert "the agent on host2 has ended, so those on host1 are ended, too" in running.stderr
    gone([*running.pids(), *running.pids("agent")])


@pytest.mark.slow
def test_an_exit_status_that_ssh_uses_itself_is_the_commands_too(launcher: Any, on_hosts: Any) -> None:
    done = launcher.run("raise SystemExit(255)", *on_hosts("host1:1,host2:1"))
    assert done.returncode == 255


@pytest.mark.slow
def test_ranks_start_again_on_their_hosts_after_a_failure(launcher: Any, on_hosts: Any) -> None:
    source = """
        import os, sys, time
        attempt, rank, node = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "GROUP_RANK"))
        if attempt == "0":
            sys.exit(3) if rank == "1" else time.sleep(60)
        print("rank", rank, "node", node, flush=True)
    """
    done = launcher.run(source, *on_hosts("host1:1,host2:1", "--max-restarts", "1"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0 host1] rank 0 node 0", "[rank 1 host2] rank 1 node 1"]


@pytest.mark.slow
@pytest.mark.torch
def test_stock_pytorch_programs_run_on_several_hosts(launcher: Any, on_hosts: Any) -> None:
    pytest.importorskip("torch")
    source = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        number = torch.ones(1)
        dist.all_reduce(number)
        print("sum", int(number), flush=True)
        dist.destroy_process_group()
    """
    done = launcher.run(source, *on_hosts(), timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 4") == 4


@pytest.mark.slow
def test_the_old_launcher_passes_local_ranks_on_other_hosts_too(launcher: Any, on_hosts: Any) -> None:
    done = launcher.run("import sys; print(*sys.argv[1:])", *on_hosts("host1:2"), command="launch", arguments=("x",))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] --local-rank={rank} x" for rank in range(2)]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--nnodes", "3"], "--nnodes is 3 (--nnodes), but the list has 2 hosts: omit --nnodes"),
        (["-n", "2"], "--nproc-per-node is 2 (--nproc-per-node), but each host of the list has its own number"),
        (["--node-rank", "1"], "--node-rank and a list of hosts exclude each other: the hosts are numbered"),
        (["--rdzv-backend", "c10d"], "--rdzv-backend and a list of hosts exclude each other"),
        (["--export", "PROCGROUP_NOT_SET"], "PROCGROUP_NOT_SET is not set here; set it, or write"),
        (["--export", "a b=1"], "got the name 'a b'"),
        (["--ssh", "/no/ssh"], "there is no program '/no/ssh': install OpenSSH's client, or name another by --ssh"),
    ],
)
def test_flags_that_contradict_the_list_are_refused(
    given: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = flags.parse("procgroup run", ["--hosts", "a:1,b:1", *given, "script.py"])
    with pytest.raises(SystemExit) as ended:
        plan_hosts(options, [])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_flag_for_other_hosts_is_refused_without_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags.parse("procgroup run", ["--chdir", "/tmp", "script.py"])
    assert "--chdir needs --hosts or --hostfile" in capsys.readouterr().err


def test_the_list_of_the_command_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("far:9\n")
    options = flags.parse("procgroup run", ["--hosts", "localhost:2", "--hostfile", str(tmp_path / "hosts"), "a.py"])
    assert [agent.host for agent in plan_hosts(options, []).agents] == [Host("localhost", 2)]


def test_what_the_configuration_of_ssh_says_is_not_overridden() -> None:
    settings = {"connecttimeout": "7", "serveraliveinterval": "60"}
    added = ["-T", "-o", "BatchMode=yes"]
    assert Ssh("sh -x").line(Host("a"), settings, "true") == ["sh", "-x", *added, "--", "a", "true"]
    said_nothing = {"connecttimeout": "none", "serveraliveinterval": "0"}
    assert "ConnectTimeout=15" in Ssh("sh").line(Host("a"), said_nothing, "true")
