"""What procgroup says: by which logger, at which level, in which format, and nothing when nothing is wrong."""

from __future__ import annotations

import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.process import log
from world import WorldFailed, run, run_command, start, wait_until


class Kept(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def texts(self) -> list[tuple[str, str, Any]]:
        return [(record.levelname, record.getMessage(), getattr(record, "rank", None)) for record in self.records]


def make_groups(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    dist.new_group([0, 1])
    dist.all_reduce(np.ones(1))
    dist.destroy_process_group()


def outputs(environment: dict[str, str]) -> list[str]:
    with start(make_groups, 2, environment=environment) as world:
        return [outcome.output for outcome in world.wait(30)]


@pytest.mark.parametrize("environment", [{}, {"PROCGROUP_LOG": "warning"}, {"PROCGROUP_LOG": "OFF"}], ids=str)
def test_nothing_is_said_when_nothing_is_wrong(environment: dict[str, str]) -> None:
    assert outputs(environment) == ["", ""]


@pytest.mark.parametrize(
    "environment", [{"PROCGROUP_LOG": "info"}, {"TORCH_DISTRIBUTED_DEBUG": "INFO"}], ids=["ours", "torch's"]
)
def test_info_is_a_line_for_each_group(environment: dict[str, str]) -> None:
    for rank, output in enumerate(outputs(environment)):
        first, second = output.splitlines()
        assert re.fullmatch(
            rf"\[rank{rank}\]: procgroup INFO: rank {rank} of 2 on \S+ \(pid \d+\): backend cpu:gloo\S*, "
            r"shared memory, calls may take 30 s, 1 host, after \d+\.\d\d s",
            first,
        ), first
        assert re.fullmatch(
            rf"\[rank{rank}\]: procgroup INFO: group 1 of ranks 0, 1: backend cpu:gloo\S*, shared memory", second
        ), second


def test_debug_says_how_the_ranks_meet_and_leave() -> None:
    for rank, output in enumerate(outputs({"PROCGROUP_LOG": "debug"})):
        assert f"[rank{rank}]: procgroup DEBUG: all 2 ranks have joined round 0\n" in output
        assert f"[rank{rank}]: procgroup DEBUG: left group 0\n" in output


def test_our_variable_wins_over_torchs() -> None:
    assert outputs({"PROCGROUP_LOG": "warning", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) == ["", ""]


def test_another_level_is_refused_at_the_start() -> None:
    with pytest.raises(WorldFailed) as caught:
        run(make_groups, 1, environment={"PROCGROUP_LOG": "loud"})
    (outcome,) = caught.value.outcomes
    assert isinstance(outcome.error, ValueError)
    assert "PROCGROUP_LOG='loud' is not usable: expected debug, info, warning, error or off" in str(outcome.error)


def wait_for_a_late_rank(rank: int, size: int, may_come: Path) -> None:
    dist.init_process_group(timeout=30)
    if rank == 1:
        wait_until(may_come.exists)
    dist.barrier()


@pytest.mark.parametrize(("level", "is_said"), [("info", True), ("warning", True), ("error", False), ("off", False)])
def test_the_lines_of_native_code_have_the_same_level_and_format(level: str, is_said: bool, tmp_path: Path) -> None:
    environment = {"PROCGROUP_LOG": level, "PROCGROUP_WAIT_REPORT_SECONDS": "0.3"}
    with start(wait_for_a_late_rank, 2, args=(tmp_path / "may come",), environment=environment) as world:
        if is_said:
            world.wait_for_output(0, "rank 0 has waited")
        else:
            world.wait_for_call(0, "barrier")
            time.sleep(1)  # longer than what is reported
        (tmp_path / "may come").touch()
        outcome = world.wait(30)[0]
    assert ("[rank0]: procgroup WARNING: rank 0 has waited" in outcome.output) == is_said, outcome.output


def break_a_group(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    with pytest.raises(dist.CollectiveMismatch):
        dist.all_reduce(np.ones(1 + rank))


def test_the_end_of_a_group_is_info() -> None:
    with start(break_a_group, 2, environment={"PROCGROUP_LOG": "info"}) as world:
        outcomes = world.wait(30)
    for rank, outcome in enumerate(outcomes):
        line = (
            f"[rank{rank}]: procgroup INFO: group 0 has ended: the ranks made different calls: rank 0 called all_reduce"
        )
        assert outcome.output.count(line) == 1, outcome.output


def have_handlers(rank: int, size: int, where: str) -> Any:
    kept = {name: Kept() for name in where.split()}
    for name, handler in kept.items():
        logging.getLogger("" if name == "root" else name).addHandler(handler)
    logging.getLogger("procgroup").addHandler(logging.NullHandler())
    dist.init_process_group(timeout=30)
    log.warning("careful")
    log.info("not wanted")
    logging.getLogger("procgroup").setLevel(logging.DEBUG)
    log.debug("wanted")
    log.error("of another rank", rank=7)
    logging.getLogger("procgroup").setLevel(logging.WARNING)
    return [handler.texts() for handler in kept.values()]


@pytest.mark.parametrize("where", ["root", "procgroup", "root procgroup"])
def test_a_program_with_handlers_gets_the_records_and_standard_error_nothing(where: str) -> None:
    with start(have_handlers, 2, args=(where,)) as world:
        outcomes = world.wait(30)
    for rank, outcome in enumerate(outcomes):
        assert outcome.ok, outcome.traceback
        for texts in outcome.value:
            assert texts == [("WARNING", "careful", rank), ("DEBUG", "wanted", rank), ("ERROR", "of another rank", 7)]
        assert outcome.output == ""


def test_a_handler_for_nothing_is_none() -> None:
    with start(have_handlers, 1, args=("",)) as world:
        (outcome,) = world.wait(30)
    assert outcome.ok, outcome.traceback
    assert outcome.output == (
        "[rank0]: procgroup WARNING: careful\n"
        "[rank0]: procgroup DEBUG: wanted\n"
        "[rank7]: procgroup ERROR: of another rank\n"
    )


def test_a_level_that_the_program_sets_is_kept() -> None:
    program = (
        "import logging; logging.getLogger('procgroup').setLevel(logging.ERROR)\n"
        "from procgroup.process import log\n"
        "log.warning('no'); log.error('yes')"
    )
    done = run_command([sys.executable, "-c", program], environment={"PROCGROUP_LOG": "debug", "RANK": "2"})
    assert done.stderr == "[rank2]: procgroup ERROR: yes\n"


def test_a_process_that_is_no_rank_has_no_prefix() -> None:
    done = run_command([sys.executable, "-c", "from procgroup.process import log; log.warning('100 % wrong')"])
    assert done.stderr == "procgroup WARNING: 100 % wrong\n"


def test_a_record_names_the_file_that_says_it(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("here")
    (record,) = caplog.records
    assert Path(record.pathname) == Path(__file__)


def test_logging_is_not_imported_for_a_start_without_a_word() -> None:
    program = (
        "import sys, procgroup as dist\n"
        "store = dist.HashStore()\n"
        "dist.init_process_group(store=store, rank=0, world_size=1)\n"
        "dist.destroy_process_group()\n"
        "print('procgroup.process.log_handler' in sys.modules)"
    )
    assert run_command([sys.executable, "-c", program]).stdout == "False\n"


def test_the_launcher_replaces_the_prefix_by_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import procgroup as dist\ndist.init_process_group()\n")
    command = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "2", str(script)]
    done = run_command(command, environment={"PROCGROUP_LOG": "info"})
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if "INFO" in line]
    assert sorted(line[:31] for line in lines) == [f"[rank {rank}] procgroup INFO: rank {rank}" for rank in (0, 1)]
