"""elastic_launch: a function as the ranks of a job, its results, its failures, its restarts."""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import procgroup as dist
from procgroup.launch import LaunchConfig, elastic_launch

ONE_NODE = LaunchConfig(nproc_per_node=2, max_restarts=0)


def place(extra: int) -> tuple[int, int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), extra


def total() -> int:
    import numpy as np

    dist.init_process_group()
    number = np.array([dist.get_rank() + 1])
    dist.all_reduce(number)
    dist.destroy_process_group()
    return int(number[0])


def fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("boom")


def exit_on_one() -> None:
    if os.environ["RANK"] == "1":
        sys.exit(17)


def fail_at_first() -> str:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("not yet")
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def leave() -> None:
    sys.exit(0)


def die_of_a_signal_without_a_name() -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 6)


def test_the_results_of_the_ranks_come_back() -> None:
    assert elastic_launch(ONE_NODE, place)(7) == {0: (0, 2, 7), 1: (1, 2, 7)}


def test_the_ranks_are_a_world_of_procgroup() -> None:
    assert elastic_launch(ONE_NODE, total)() == {0: 3, 1: 3}


def test_an_exception_comes_back_with_its_traceback_and_rank() -> None:
    with pytest.raises(dist.ProcessRaisedException) as raised:
        elastic_launch(ONE_NODE, fail_on_one)()
    assert raised.value.error_index == 1
    assert "ValueError: boom" in str(raised.value)
    assert "in fail_on_one" in str(raised.value)
    assert "function_worker.py" not in str(raised.value)


def test_an_exit_status_comes_back() -> None:
    with pytest.raises(dist.ProcessExitedException) as raised:
        elastic_launch(ONE_NODE, exit_on_one)()
    assert (raised.value.exit_code, raised.value.error_index) == (17, 1)


def test_the_ranks_start_again_while_a_restart_is_left() -> None:
    assert elastic_launch(LaunchConfig(max_restarts=1), fail_at_first)() == {0: "1"}


def test_a_rank_that_exits_with_status_0_has_no_result() -> None:
    assert elastic_launch(ONE_NODE, leave)() == {0: None, 1: None}


def test_a_signal_without_a_name_is_reported_by_its_number() -> None:
    with pytest.raises(dist.ProcessExitedException, match=f"killed by <Unknown signal {signal.SIGRTMIN + 6}>"):
        elastic_launch(ONE_NODE, die_of_a_signal_without_a_name)()


def test_a_launch_leaves_no_descriptor_behind() -> None:
    elastic_launch(ONE_NODE, leave)()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        elastic_launch(ONE_NODE, leave)()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_nodes_that_do_not_come_together_are_an_error(tmp_path: Path) -> None:
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        rdzv_backend="file",
        rdzv_endpoint=str(tmp_path / "store"),
        rdzv_configs={"join_timeout": 0.5},
    )
    with pytest.raises(dist.RendezvousError, match="ended with status 1 although no rank failed"):
        elastic_launch(config, place)(1)


def test_a_command_can_be_launched() -> None:
    assert elastic_launch(ONE_NODE, "true")() == {0: None, 1: None}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (LaunchConfig(min_nodes=2, max_nodes=1), "expected N or MIN:MAX"),
        (LaunchConfig(nproc_per_node=0), "expected a number of at least 1"),
        (LaunchConfig(rdzv_backend="zeus"), "got 'zeus'"),
        (LaunchConfig(max_nodes=2), "has a fixed number of nodes"),
        (LaunchConfig(min_nodes=2, max_nodes=2, rdzv_backend="c10d"), "needs --rdzv-endpoint"),
        (LaunchConfig(rdzv_configs={"hope": 1}), "got 'hope'"),
        (LaunchConfig(rdzv_configs={"rank": 1}), "--node-rank is 1"),
        (LaunchConfig(log_line_prefix_template="${hope}"), "got \\${hope}"),
    ],
)
def test_an_unusable_configuration_raises(config: LaunchConfig, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        elastic_launch(config, place)


def test_a_configuration_of_a_torch_program_is_taken_as_it_is() -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="job",
        rdzv_endpoint="localhost:0",
        rdzv_backend="c10d",
        rdzv_configs={"timeout": 5},
        rdzv_timeout=900,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        log_line_prefix_template="[${role_name}${local_rank}]:",
        local_addr=None,
        event_log_handler="null",
        signals_to_handle="SIGTERM,SIGINT",
        duplicate_stdout_filters=["a,b", "c"],
        duplicate_stderr_filters=None,
        shutdown_timeout=None,
    )
    assert elastic_launch(config=config, entrypoint=place)(7) == {0: (0, 2, 7), 1: (1, 2, 7)}


def test_the_variables_of_commands_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"PET_MODULE": "1", "PET_STANDALONE": "1", "PET_NODE_RANK": "3", "PROCGROUP_RDZV_ENDPOINT": "a:1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert elastic_launch(ONE_NODE, place)(7) == {0: (0, 2, 7), 1: (1, 2, 7)}


def test_every_field_of_torch_s_configuration_is_there_but_those_that_hold_objects_of_torch() -> None:
    if (torch := importlib.util.find_spec("torch")) is None:
        pytest.skip("PyTorch is not installed")
    # Read and not imported: that takes more than a second.
    tree = ast.parse(Path(torch.submodule_search_locations[0], "distributed", "launcher", "api.py").read_text())
    (torch_s,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LaunchConfig")
    names = {ast.unparse(line.target) for line in torch_s.body if isinstance(line, ast.AnnAssign)}
    missing = names - {field.name for field in fields(LaunchConfig)}
    assert missing == {"logs_specs", "metrics_cfg", "numa_options"}


def test_the_fields_are_flags() -> None:
    config = LaunchConfig(
        rdzv_configs={"rank": 1, "timeout": 5},
        rdzv_timeout=7,
        max_nodes=2,
        log_line_prefix_template="[${role_name}${local_rank}]:",
        duplicate_stdout_filters=["a,b", "c"],
        virtual_local_rank=True,
    )
    written = {"--node-rank=1", "--rdzv-conf=timeout=7", "--log-prefix=[{role}{local_rank}]:"}
    assert written | {"--duplicate-stdout-filters=a,,b,c", "--virtual-local-rank"} <= set(config.arguments())


def test_another_thread_than_the_main_one_is_told_so() -> None:
    said: list[str] = []

    def launch() -> None:
        try:
            elastic_launch(ONE_NODE, "true")()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert "call it in the main thread" in said[0]


def test_ctrl_c_ends_the_ranks_and_raises(tmp_path: Path) -> None:
    source = """
from procgroup.launch import LaunchConfig, elastic_launch

if __name__ == "__main__":
    try:
        elastic_launch(LaunchConfig(), "sh")("-c", "echo started; sleep 60")
    except KeyboardInterrupt:
        print("interrupted")
"""
    script = tmp_path / "script.py"
    script.write_text(source)
    with subprocess.Popen([sys.executable, "-u", str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "started" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=40) == 0
        assert process.stdout.read().endswith("interrupted\n")


def test_a_function_of_the_main_program_can_be_launched(tmp_path: Path) -> None:
    source = """
import os
from procgroup.launch import LaunchConfig, elastic_launch

def rank():
    return int(os.environ["RANK"])

if __name__ == "__main__":
    print(elastic_launch(LaunchConfig(nproc_per_node=2), rank)())
"""
    script = tmp_path / "script.py"
    script.write_text(source)
    done: Any = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "{0: 0, 1: 1}\n", done.stderr
