"""Flags: torchrun's names, both spellings, PET_ variables, and a clear sentence for what does not work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from procgroup.cluster import accelerators
from procgroup.cluster.control_group import usable_cores
from procgroup.launch import flags
from procgroup.launch.job_plan import unused_flags
from procgroup.launch.run import plan_job
from world import run_command

BEYOND_INTEGERS = "9" * 23
AT_MOST = f"and at most 999999, got '{BEYOND_INTEGERS}'"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, **more: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        flags.parse("procgroup run", arguments, **more)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nproc_per_node"])
@pytest.mark.parametrize("equals", [True, False])
def test_both_spellings_and_both_forms_are_read(flag: str, equals: bool) -> None:
    given = [f"{flag}=3"] if equals else [flag, "3"]
    assert flags.parse("run", [*given, "a.py", "--x"]).nproc_per_node == 3


@pytest.mark.parametrize("given", [["-n", "3"], ["-n3"], ["-n=3"], ["-np", "3"]])
def test_the_number_of_ranks_has_short_flags(given: list[str]) -> None:
    options = flags.parse("run", [*given, "a.py", "-n", "9"])
    assert (options.nproc_per_node, options.script_arguments) == (3, ["-n", "9"])


@pytest.mark.torch
def test_the_short_flags_are_none_of_torchrun_s() -> None:
    run = pytest.importorskip("torch.distributed.run")
    assert not {"-n", "-np"} & set(run.get_args_parser()._option_string_actions)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("--nproc_per_nod=4", "did you mean --nproc-per-node?"),
        ("--nproc", "did you mean --nproc-per-node?"),
        ("--nprocs=4", "did you mean --nproc-per-node?"),
        ("--np", "did you mean --nproc-per-node?"),
        ("--logdir", "did you mean --log-dir?"),
        ("-N", "did you mean -n or -np?"),
        ("--xyz", "procgroup run --help lists the flags."),
    ],
)
def test_a_misspelt_flag_is_named_with_the_closest_one(
    given: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, given, "a.py")
    assert f"there is no flag {given.partition('=')[0]}: {advice}" in said


def test_one_node_may_be_described_as_torchrun_has_it() -> None:
    line = "--nproc_per_node=2 --nnodes=1 --node_rank=0 --master_addr=127.0.0.1 --master_port=29500 a.py b"
    options = flags.parse("run", line.split())
    assert (options.master_addr, options.master_port) == ("127.0.0.1", 29500)
    assert (options.script, options.script_arguments) == ("a.py", ["b"])
    assert flags.parse("run", ["--standalone", "--nnodes", "1:1", "a.py"]).standalone


def test_what_follows_the_script_is_the_script_s() -> None:
    options = flags.parse("run", ["a.py", "--nnodes", "9", "--rdzv-backend", "c10d", "-h"])
    assert options.script_arguments == ["--nnodes", "9", "--rdzv-backend", "c10d", "-h"]


def test_cpu_and_auto_count_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "visible_gpus", lambda: 0)
    assert flags.parse("run", ["--nproc-per-node", "cpu", "a.py"]).nproc_per_node == usable_cores()
    assert flags.parse("run", ["--nproc-per-node", "auto", "a.py"]).nproc_per_node == usable_cores()
    monkeypatch.setattr(accelerators, "visible_gpus", lambda: 3)
    assert flags.parse("run", ["--nproc-per-node", "auto", "a.py"]).nproc_per_node == 3


def test_pet_variables_are_defaults_and_flags_beat_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_MODULE", "1")
    options = flags.parse("run", ["mod"])
    assert (options.nproc_per_node, options.module) == (3, True)
    assert flags.parse("run", ["--nproc-per-node", "2", "mod"]).nproc_per_node == 2


def test_procgroup_variables_are_defaults_below_pet_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCGROUP_MAX_RESTARTS", "4")
    monkeypatch.setenv("PROCGROUP_NNODES", "3")
    monkeypatch.setenv("PET_NNODES", "2")
    options = flags.parse("run", ["a.py"])
    assert (options.max_restarts, str(options.nnodes)) == (4, "2")
    assert options.sources["max_restarts"] == "PROCGROUP_MAX_RESTARTS"
    assert options.sources["nnodes"] == "PET_NNODES"
    assert options.sources["role"] == "default"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PET_NNODES", "0"),
        ("PET_NNODES", "3:2"),
        ("PROCGROUP_RDZV_BACKEND", "x"),
        ("PET_STANDALONE", "maybe"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon"),
    ],
)
def test_variables_with_unusable_values_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert f"{name}={value!r}, set in the environment, is not usable: expected" in refusal(capsys, "a.py")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PROCGROUP_JOB_KEY", "junk", " (4 characters) is not usable: expected hex digits, two for each byte"),
        ("PROCGROUP_JOB_KEY", "abc", " (3 characters) is not usable: expected hex digits, two for each byte"),
        ("PROCGROUP_JOB_KEY", " ", " (1 characters) is not usable: expected hex digits, two for each byte"),
        ("PROCGROUP_WAIT_REPORT_SECONDS", "junk", "='junk' is not usable: expected a number of seconds"),
        ("PROCGROUP_TRANSPORT", "junk", "='junk' is not usable: expected auto, shm or tcp"),
    ],
)
def test_variables_of_the_ranks_with_unusable_values_are_named_and_a_secret_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(name, value)
    said = refusal(capsys, "a.py")
    assert f"environment variable {name}{expected}" in said
    assert "abc" not in said


@pytest.mark.parametrize(
    ("flag", "value", "known"),
    [("--logs-specs", "mine", "default"), ("--logs_specs", "mine", "default"), ("--event-log-handler", "mine", "null")],
)
def test_plug_ins_that_do_not_exist_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, known: str
) -> None:
    assert f"expected {known}" in refusal(capsys, flag, value, "a.py")


@pytest.mark.parametrize(
    ("line", "first", "second"),
    [
        ("--standalone --nnodes 2", "--standalone (--standalone)", "--nnodes is 2 (--nnodes)"),
        ("--nnodes 1:2", "--rdzv-backend static (default)", "--nnodes is 1:2 (--nnodes)"),
        ("--node-rank 1", "--nnodes 1 (default)", "--node-rank is 1 (--node-rank)"),
        ("--nnodes 2 --node-rank 2", "--nnodes 2 (--nnodes)", "--node-rank is 2 (--node-rank)"),
        ("--standalone --rdzv-endpoint a:1", "--standalone (--standalone)", "--rdzv-endpoint is a:1 (--rdzv-endpoint)"),
        ("--nnodes 2 --rdzv-endpoint a:1 --master-addr b", "--rdzv-endpoint a:1 (", "--master-addr is b (--m"),
        ("--nnodes 2 --rdzv-endpoint a:1 --master-port 2", "--rdzv-endpoint a:1 (", "--master-port is 2 (--m"),
    ],
)
def test_contradictory_flags_are_refused_with_both_their_sources(
    capsys: pytest.CaptureFixture[str], line: str, first: str, second: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan_job(flags.parse("procgroup run", [*line.split(), "a.py"]))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert first in said
    assert second in said


@pytest.mark.parametrize("line", ["", "--master-addr a --master-port 1", "--master-addr [a]"])
def test_an_endpoint_and_the_same_address_are_no_contradiction(line: str) -> None:
    options = flags.parse("run", ["--nnodes", "2", "--rdzv-endpoint", "a:1", *line.split(), "a.py"])
    _, meeting = plan_job(options)
    assert meeting is not None
    assert meeting.endpoints == (("a", 1),)


@pytest.mark.parametrize("backend", ["static", "redis"])
def test_a_list_of_endpoints_is_refused_where_only_the_first_would_be_used(
    capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    line = ["--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", "a,b", "a.py"]
    with pytest.raises(SystemExit):
        plan_job(flags.parse("procgroup run", line))
    said = "(--rdzv-endpoint): expected one host[:port] with this --rdzv-backend, got the list 'a,b'"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("line", ["--nnodes 2 --rdzv-backend c10d", "--rdzv-backend file"])
def test_nodes_that_are_to_meet_need_a_place(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with pytest.raises(SystemExit):
        plan_job(flags.parse("procgroup run", [*line.split(), "a.py"]))
    assert "needs --rdzv-endpoint" in capsys.readouterr().err


def test_what_has_no_effect_with_assigned_node_ranks_is_said() -> None:
    options = flags.parse("run", ["--rdzv-backend", "c10d", "--rdzv-endpoint", "h", "--node-rank", "1", "a.py"])
    assert unused_flags(options, plan_job(options)[0]) == [
        "--node-rank has no effect with --rdzv-backend c10d: node ranks are assigned"
    ]


def test_an_endpoint_at_which_one_node_would_meet_nobody_is_said_to_have_no_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "junk")
    options = flags.parse("run", ["a.py"])
    assert unused_flags(options, plan_job(options)[0]) == ["PET_RDZV_ENDPOINT has no effect: this job has one node"]


TASK_OF_SRUN = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("tasks", "flags_given", "is_said"), [("2", [], True), ("1", [], False), ("2", ["--standalone"], False)]
)
def test_launchers_that_srun_started_beside_each_other_without_a_common_job_say_so(
    launcher: Any, monkeypatch: pytest.MonkeyPatch, tasks: str, flags_given: list[str], is_said: bool
) -> None:
    for name, value in {**TASK_OF_SRUN, "SLURM_STEP_NUM_TASKS": tasks}.items():
        monkeypatch.setenv(name, value)
    done = launcher.run("", *flags_given)
    assert done.returncode == 0
    said = "procgroup run: srun (Slurm) started 2 of these launchers, and each runs a job of its own (--standalone,"
    assert (said in done.stderr) == is_said


@pytest.mark.parametrize("flag", ["--master-addr", "--local-addr"])
def test_an_address_is_taken_in_brackets_and_blamed_on_its_own_flag(launcher: Any, flag: str) -> None:
    done = launcher.run("import os; print(os.environ['MASTER_ADDR'])", flag, "[::1]")
    assert done.stdout == "[rank 0] ::1\n", done.stderr
    done = launcher.run("", flag, "nowhere.invalid")
    assert done.returncode == 1
    assert f"cannot use {flag} nowhere.invalid: " in done.stderr


def test_too_low_a_limit_on_open_files_is_named_with_the_remedy(launcher: Any) -> None:
    command = [sys.executable, "-m", "procgroup", "run", "-n", "40", str(launcher.script(""))]
    done = subprocess.run(["prlimit", "--nofile=48:48", *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "this process may have no more than 48 open files; raise the limit with: ulimit -n" in done.stderr


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--nnodes 2:1 a.py", "expected N or MIN:MAX with 0 < MIN <= MAX, got '2:1'"),
        ("--nnodes 0 a.py", "got '0'"),
        ("--node-rank x a.py", "expected a number of at least 0, got 'x'"),
        ("--max-restarts -1 a.py", "--max-restarts"),
        ("--rdzv-backend zeus a.py", "expected static or c10d or file or etcd or etcd-v2 or redis, got 'zeus'"),
        ("--rdzv-conf timeout a.py", "expected key=value,key=value, got 'timeout'"),
        ("--rdzv-conf tiemout=3 a.py", "got 'tiemout'"),
        ("--rdzv-conf join_timeout=abc a.py", "join_timeout: expected a number of seconds of at least 0, got 'abc'"),
        ("--rdzv-conf is_host=perhaps a.py", "expected is_host to be 1 or 0, got 'perhaps'"),
        ("--on-partition hope a.py", "expected continue or stop, got 'hope'"),
        ("--nproc-per-node 0 a.py", "expected a number of at least 1, cpu, gpu or auto, got '0'"),
        ("--nproc-per-node -2 a.py", "--nproc-per-node"),
        ("--nproc-per-node two a.py", "got 'two'"),
        ("--nproc-per-node ² a.py", "got '²'"),
        ("--master-port 70000 a.py", "expected a port from 0 to 65535"),
        ("--shutdown-timeout -1 a.py", "--shutdown-timeout"),
        ("--shutdown-timeout nan a.py", "at least 0, got 'nan'"),
        ("--signals-to-handle SIGFOO a.py", "got 'SIGFOO'"),
        ("--signals-to-handle SIGKILL a.py", "such as SIGTERM,SIGINT, got 'SIGKILL'"),
        ("-m --no-python a", "exclude each other: omit one of them"),
        ("--no-such-flag a.py", "there is no flag --no-such-flag"),
        ("--nproc 2 a.py", "--nproc"),
        (
            f"-n {BEYOND_INTEGERS} a.py",
            f"--nproc-per-node: expected a number of at least 1, cpu, gpu or auto, {AT_MOST}",
        ),
        (f"--nnodes {BEYOND_INTEGERS} a.py", f"--nnodes: expected N or MIN:MAX with 0 < MIN <= MAX, {AT_MOST}"),
        (f"--max-restarts {'9' * 5000} a.py", f"got '{'9' * 60}'... (5000 characters)"),
        (f"--show-ranks {'9' * 5000} a.py", "expected ranks such as 0,3-5, got '999"),
        (f"--rdzv-conf keep_alive_max_attempt={'9' * 5000} a.py", "at most 999999999, got"),
        (
            "--rdzv-conf keep_alive_interval=1e300 a.py",
            "--rdzv-conf: keep_alive_interval: expected at most 1000000000 seconds",
        ),
        (
            "--rdzv-conf keep_alive_interval=1e6,keep_alive_max_attempt=9999 a.py",
            "expected keep_alive_interval times keep_alive_max_attempt to be at most 1000000000 seconds",
        ),
        ("--master-addr= a.py", "argument --master-addr: expected a host's name or address, got ''"),
        ("--local-addr [] a.py", "argument --local-addr: expected a host's name or address, got '[]'"),
        ("--shutdown-timeout inf a.py", "expected at most 1000000000 seconds, got 'inf'"),
        ("", "script"),
    ],
)
def test_unusable_command_lines_say_why(capsys: pytest.CaptureFixture[str], line: str, sentence: str) -> None:
    said = refusal(capsys, *line.split())
    assert sentence in said
    assert len(said.splitlines()) <= 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nothing.py",), "there is no script 'nothing.py'"),
        (("",), "there is no script ''"),
        (("-m", "no_such_module"), "there is no module 'no_such_module'"),
        (("--no-python", "no-such-program"), "there is no program 'no-such-program'"),
    ],
)
def test_a_missing_program_is_said_before_anything_starts(arguments: tuple[str, ...], sentence: str) -> None:
    done = run_command([sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "4", *arguments])
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "rank" not in done.stderr
    assert done.stdout == ""


def test_a_module_and_another_program_run_too(launcher: Any) -> None:
    launcher.script("import sys; print('module', sys.argv[1:])", "some_module.py")
    command = [sys.executable, "-m", "procgroup", "run"]
    done = run_command([*command, "-m", "some_module", "a"], directory=launcher.directory, environment=WITH_SOURCES)
    assert done.stdout == "[rank 0] module ['a']\n", done.stderr
    done = run_command([*command, "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE"])
    assert done.stdout == "[rank 0] 0 of 1\n"


WITH_SOURCES = {"PYTHONPATH": str(Path(flags.__file__).parents[2])}


def test_a_program_that_cannot_be_executed_fails_with_its_name(launcher: Any) -> None:
    program = launcher.directory / "broken"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    done = run_command([sys.executable, "-m", "procgroup", "run", "--no-python", str(program)])
    assert done.returncode == 126
    assert f"{program}: Exec format error" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"], ["launch", "--help"], ["--version"]])
def test_help_and_version_end_well(arguments: list[str]) -> None:
    done = run_command([sys.executable, "-m", "procgroup", *arguments])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("procgroup " if arguments == ["--version"] else "usage: procgroup")


def test_an_unknown_command_is_named_with_those_that_exist() -> None:
    done = run_command([sys.executable, "-m", "procgroup", "walk"])
    assert done.returncode == 2
    assert "no command 'walk'; the commands are: run, bench, explain, top, metrics, doctor, capabilities" in done.stderr


def test_help_of_run_is_quick_and_loads_no_array_library() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "procgroup", "run", "--help"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for heavy in ("numpy", "psutil", "rich", "asyncio", "multiprocessing", "torch"):
        assert f" {heavy}\n" not in loaded
    times = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-m", "procgroup", "run", "--help"], capture_output=True, check=True)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.2, "seconds of a core, whatever else the machine has to do"
