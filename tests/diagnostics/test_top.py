"""``procgroup top`` shows what the ranks of a running job do, marks what is wrong, and does not disturb the job."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup import _native
from procgroup.diagnostics.recorded_job import reading
from procgroup.diagnostics.top import live, watch
from procgroup.diagnostics.top import watch as watching
from procgroup.diagnostics.top.watch import JobWatch, Row
from procgroup.launch.output import progress
from world import World, run, start

HERE = r"test_top\.py:\d+"
WITHOUT_RICH = "import sys; sys.modules['rich'] = None; from procgroup.__main__ import main; sys.exit(main())"
ROW = Row(0, "running", "all_reduce #1", 1.0, 1.0, 1.0, 0.0, "", False, False)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "procgroup", "top", *arguments]


def top(directory: Path, *arguments: str) -> tuple[int, str]:
    """Run the command without a terminal; return its exit status and what it prints."""
    environment = os.environ | {"PROCGROUP_RECORD_DIR": str(directory)}
    done = subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, timeout=50, check=False)
    return done.returncode, done.stdout + done.stderr


class Terminal:
    """A command on a pseudo-terminal of 24 lines with 140 columns, and all that it has drawn."""

    def __init__(self, directory: Path, arguments: list[str]) -> None:
        self.descriptor, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 140, 0, 0))
        self.before = termios.tcgetattr(other)
        self.drawn = ""
        environment = os.environ | {"PROCGROUP_RECORD_DIR": str(directory), "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):  # of pytest's terminal
            environment.pop(name, None)
        self.process = subprocess.Popen(
            arguments, env=environment, stdin=other, stdout=other, stderr=other, start_new_session=True
        )
        self._other = other

    def wait_for(self, pattern: str, timeout: float = 120) -> None:
        """Wait until the text that was drawn, without control sequences, has a match of this."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, self.text[-4000:]
            self._read(0.05)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.drawn)

    def press(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def wait(self, timeout: float = 120) -> int:
        """Return the exit status."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text[-4000:]
            self._read(0.05)
        self._read(0.2)
        return self.process.returncode

    def has_its_old_mode(self) -> bool:
        return termios.tcgetattr(self._other) == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._other)
        os.close(self.descriptor)

    def _read(self, seconds: float) -> None:
        while select.select([self.descriptor], [], [], seconds)[0]:
            self.drawn += os.read(self.descriptor, 65536).decode(errors="replace")
            seconds = 0


def work(rank: int, size: int) -> None:
    dist.init_process_group()
    for step in range(100_000):
        time.sleep(0.02 if rank == 1 else 0.001)
        dist.all_reduce(np.ones(1000))
        dist.report(step=step, loss=1 / 3, phase="[bold]warm\x1b[2J-up")


def load_batch() -> None:
    time.sleep(60)


def hang(rank: int, size: int) -> None:
    dist.init_process_group()
    for _ in range(3):
        dist.all_reduce(np.ones(4))
    if rank == 2:
        load_batch()
    dist.all_reduce(np.ones(4))


def work_until_a_file_is_there(rank: int, size: int) -> None:
    dist.init_process_group()
    stop = np.zeros(1)
    while not stop[0]:
        stop[0] = Path(os.environ["STOP"]).exists()
        dist.all_reduce(stop)
        time.sleep(0.02)
    dist.destroy_process_group()


@pytest.fixture(name="working", scope="module")
def fixture_working(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The records of a job of three ranks that works until the end of these tests, rank 1 more slowly."""
    directory = tmp_path_factory.mktemp("records")
    with start(work, 3, environment={"PROCGROUP_RECORD_DIR": str(directory)}) as world:
        await_records(directory, world, calls=10)
        yield directory


@pytest.fixture(name="hanging")
def fixture_hanging(tmp_path: Path) -> Iterator[Path]:
    """The records of a job of four ranks that waits for rank 2."""
    variables = {"PROCGROUP_RECORD_DIR": str(tmp_path), "PROCGROUP_WAIT_REPORT_SECONDS": "0"}
    with start(hang, 4, environment=variables) as world:
        await_records(tmp_path, world, calls=3)
        yield tmp_path


def records(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.record"))


def recorded(path: Path) -> int:
    try:
        return int(_native.read_flight_record(str(path))["recorded"])
    except ValueError:  # its rank is making it
        return 0


def await_records(directory: Path, world: World, calls: int) -> None:
    deadline = time.monotonic() + 40
    while len(found := records(directory)) < len(world.pids) or any(recorded(path) < calls for path in found):
        assert time.monotonic() < deadline, [world.output(rank) for rank in range(len(world.pids))]
        time.sleep(0.02)


@pytest.fixture(name="terminal")
def fixture_terminal(working: Path) -> Iterator[Terminal]:
    terminal = Terminal(working, command())
    yield terminal
    terminal.close()


def test_a_table_has_each_rank_s_state_call_rates_and_report(working: Path) -> None:
    status, text = top(working, "--once")
    while re.search(r" 0 B ", text):  # a machine that is busy elsewhere: no call was made meanwhile
        status, text = top(working, "--once")
    assert status == 0
    first, second, empty, headings, *rows = text.splitlines()
    assert re.match(rf"job {next(working.iterdir()).name}: \S", first) and not empty
    assert re.fullmatch(r"3 ranks on \S+: 3 running; running for \d+\.\d s", second), second
    assert headings.split() == ["rank", "state", "call", "for", "calls/s", "bytes/s", "waits", "reported"]
    for rank, row in enumerate(rows):
        found = re.fullmatch(
            rf" +{rank}  (running|slowest) +(?:after )?all_reduce #\d+ at {HERE} +(?:\d+\.\d s)? +(\S+) +(\S+) kB "
            r"+(\d+) %  step \d+, loss 0\.3333, phase \[bold\]warm\?\[2J-up",
            row,
        )
        assert found, row
        calls, kilobytes = float(found[2]), float(found[3])
        assert 0 < calls < 60 and kilobytes == pytest.approx(8 * calls, rel=0.02, abs=0.5)
    assert len(rows) == 3


def test_the_slowest_rank_is_marked_and_the_others_wait_for_it(working: Path) -> None:
    watch, deadline = JobWatch(next(working.iterdir())), time.monotonic() + 40
    while True:  # a rank that the machine holds up is the slowest for a moment
        rows = watch.look().rows
        is_marked = [row.is_slowest for row in rows] == [False, True, False]
        if is_marked and rows[0].waiting_share > 0.4 > 0.2 > rows[1].waiting_share:
            return
        assert time.monotonic() < deadline, rows
        time.sleep(0.2)


def test_a_job_is_chosen_by_the_beginning_of_its_name_and_the_newest_that_runs_without(working: Path) -> None:
    name = next(working.iterdir()).name
    ended = working / "ended"
    ended.mkdir()
    (ended / "0-1.record").write_bytes(b"")
    try:
        assert top(working, name[:5], "--once")[1].startswith(f"job {name}")
        assert top(working, "--once")[1].startswith(f"job {name}")
    finally:
        (ended / "0-1.record").unlink()
        ended.rmdir()


def test_there_is_no_such_job(working: Path) -> None:
    status, text = top(working, "another")
    assert (status, text) == (2, f"procgroup top: there is no flight record of job 'another' (kept in {working})\n")


def test_a_late_rank_is_named_with_its_line_and_others_with_how_long_they_wait(hanging: Path) -> None:
    shown = re.compile(
        rf"(?ms)^! rank 2 never entered all_reduce #4 of group 0 at {HERE}; it is in load_batch at {HERE}, "
        rf"called by hang at {HERE}; ranks 0, 1, 3 have waited for \d+\.\d s$.*"
        rf"^ +2  running +in load_batch at {HERE}[^\n]*\n +3  running +all_reduce #4 at {HERE} +\d\.\d s"
    )
    environment = os.environ | {"PROCGROUP_RECORD_DIR": str(hanging)}
    with subprocess.Popen(command(), env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = ""
        while not shown.search(text):
            text += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 0


def test_stacks_are_requested_of_the_awaited_rank_alone_and_seldom(
    hanging: Path, working: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, deadline = next(hanging.iterdir()), time.monotonic() + 40
    watch, asked = JobWatch(job), list[float]()
    request = reading.request_stacks

    def count(directory: Path, ranks: list[int]) -> None:
        assert (directory, ranks) == (job, [2])
        asked.append(time.monotonic())
        request(directory, ranks)

    monkeypatch.setattr(reading, "request_stacks", count)
    stacks: list[Any] = []
    while len(asked) < 2 or not stacks or stacks[2] is None:
        assert time.monotonic() < deadline, (asked, stacks)
        watch.look()
        time.sleep(0.1)
        stacks = [_native.read_flight_record(str(path))["stack"] for path in records(hanging)]
    assert asked[1] - asked[0] > 0.9 * watching.SECONDS_BETWEEN_STACKS
    assert stacks[:2] + stacks[3:] == [None] * 3
    assert all(_native.read_flight_record(str(path))["stack"] is None for path in records(working))


def test_the_live_view_is_drawn_again_and_again_and_q_ends_it(terminal: Terminal) -> None:
    terminal.wait_for(rf" 2 +running +(?:after )?all_reduce #\d+ at {HERE}")
    terminal.wait_for(r" 1 +slowest")
    terminal.wait_for(r"(?s)(calls/s.*){4}")
    terminal.wait_for(r"phase \[bold\]warm\?")
    assert not terminal.has_its_old_mode()
    terminal.press(b"xq")
    assert terminal.wait() == 0
    assert terminal.drawn.count("\x1b[?1049h") == terminal.drawn.count("\x1b[?1049l") == 1
    assert terminal.has_its_old_mode()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_the_live_view_and_leaves_the_terminal_as_it_was(
    terminal: Terminal, number: signal.Signals, status: int
) -> None:
    terminal.wait_for("calls/s")
    terminal.process.send_signal(number)
    assert terminal.wait() == status
    assert terminal.drawn.rstrip().endswith("\x1b[?1049l") and terminal.has_its_old_mode()


def test_the_live_view_shows_in_red_what_is_wrong(hanging: Path) -> None:
    terminal = Terminal(hanging, command())
    try:
        terminal.wait_for(rf"rank 2 never entered all_reduce #4 of group 0 at {HERE}; it is in load_batch")
        assert re.search(r"\x1b\[1;31mrank 2 never entered", terminal.drawn)
    finally:
        terminal.close()


def test_without_rich_a_terminal_shows_text_and_q_ends_it(working: Path) -> None:
    terminal = Terminal(working, [sys.executable, "-c", WITHOUT_RICH, "top"])
    try:
        terminal.wait_for(r"(?s)running for.*running for")
        assert "\x1b" not in terminal.drawn
        terminal.press(b"q")
        assert terminal.wait() == 0 and terminal.has_its_old_mode()
    finally:
        terminal.close()


def test_the_end_of_a_job_is_reported(tmp_path: Path) -> None:
    variables = {"PROCGROUP_RECORD_DIR": str(tmp_path), "STOP": str(tmp_path / "stop")}
    with start(work_until_a_file_is_there, 2, environment=variables) as world:
        await_records(tmp_path, world, calls=1)
        terminal = Terminal(tmp_path, command())
        try:
            terminal.wait_for("2 running")
            (tmp_path / "stop").touch()
            assert terminal.wait() == 0
        finally:
            terminal.close()
    assert re.search(r"the job has ended\s+all 2 ranks of job \S+ left in order", terminal.text), terminal.text


def test_the_rank_that_was_killed_is_named_at_the_end(tmp_path: Path) -> None:
    variables = {"PROCGROUP_RECORD_DIR": str(tmp_path), "PROCGROUP_WAIT_REPORT_SECONDS": "0"}
    with start(hang, 4, environment=variables) as world:
        await_records(tmp_path, world, calls=3)
        world.kill(2)
        world.wait()
    status, text = top(tmp_path)
    assert status == 0 and re.match(r"the job has ended\nrank 2 is lost: its process \(pid \d+ on \S+\)", text), text


def fork_and_report(rank: int, size: int) -> int:
    dist.init_process_group()
    dist.report(step=1)
    child = os.fork()
    if child == 0:
        progress._next_time = 0.0
        dist.report(step=2)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_report_is_in_the_rank_s_record_and_not_that_of_a_forked_child(tmp_path: Path) -> None:
    assert run(fork_and_report, 2, environment={"PROCGROUP_RECORD_DIR": str(tmp_path)}) == [0, 0]
    assert [_native.read_flight_record(str(path))["report"][1] for path in records(tmp_path)] == ["step 1"] * 2


def test_where_not_all_rows_fit_those_that_are_the_cause_are_kept() -> None:
    rows = [ROW._replace(rank=rank, is_cause=rank == 50, is_slowest=rank == 60) for rank in range(64)]
    assert [row.rank for row in live.fitting(rows, 4)] == [0, 1, 50, 60]
    assert live.fitting(rows, 100) == rows


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12345, "12.3 kB"), (999_900, "1 MB"), (5e15, "5000 TB")],
)
def test_rates_have_units(rate: float, shown: str) -> None:
    assert watch.cells(ROW._replace(bytes_per_second=rate))[5] == shown
