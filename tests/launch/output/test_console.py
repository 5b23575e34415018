"""The launcher's flags about output, from end to end: on a terminal and into files, with full disks and error files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BOTH = "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"


def test_only_the_chosen_ranks_are_shown_and_files_have_all(launcher: Any) -> None:
    logs = launcher.directory / "logs"
    done = launcher.run(BOTH, "-n", "4", "--show-ranks", "0,2-3", "--local-ranks-filter=2", "--log-dir", str(logs))
    assert done.stdout == "[rank 2] out 2\n"
    kept = sorted(path.read_text() for path in logs.glob("*/attempt_0/*/stdout.log"))
    assert kept == [f"out {rank}\n" for rank in range(4)]


def test_redirects_and_tee_take_torchrun_s_values(launcher: Any) -> None:
    flags = "-n 2 -r 0:3 --tee 1:2 --rdzv-id job --log-dir"
    done = launcher.run(BOTH, *flags.split(), str(launcher.directory))
    assert done.stdout == "[rank 1] out 1\n"
    assert "err 1" in done.stderr and "err 0" not in done.stderr
    assert (launcher.directory / "job" / "attempt_0" / "0" / "stderr.log").read_text() == "err 0\n"


def test_matching_lines_are_kept_together(launcher: Any) -> None:
    source = "import os; print('loss', os.environ['RANK']); print('other')"
    logs = launcher.directory / "logs"
    done = launcher.run(source, "-n", "2", "--duplicate-stdout-filters", "x,loss", "--log-dir", str(logs))
    assert done.returncode == 0, done.stderr
    (kept,) = logs.glob("*/attempt_0/filtered_stdout.log")
    assert sorted(kept.read_text().splitlines()) == ["[rank 0] loss 0", "[rank 1] loss 1"]


def test_prefixes_follow_the_template_and_equal_lines_are_collapsed_when_asked(launcher: Any) -> None:
    source = "import os; print('same'); print('own', os.environ['RANK'])"
    done = launcher.run(source, "-n", "3", "--collapse", "always", "--log-prefix", "<{local_rank} {role}>")
    own = sorted(line for line in done.stdout.splitlines() if "own" in line)
    same = [line for line in done.stdout.splitlines() if "own" not in line]
    assert own == [f"<{rank} default> own {rank}" for rank in range(3)]
    assert all(line.endswith(" same") for line in same)
    assert sum(int(line.partition("(x")[2].partition(")")[0] or 1) for line in same) == 3


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--tee", "5"), "argument --tee: expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or 0:1,10:3, got '5'"),
        (("--show-ranks", "a"), "expected ranks such as 0,3-5, got 'a'"),
        (("--log-dir", "/proc/nowhere"), "cannot keep or show the ranks' output: [Errno 2] No such"),
    ],
)
def test_unusable_values_are_refused_before_anything_starts(
    launcher: Any, flags: tuple[str, ...], sentence: str
) -> None:
    done = launcher.run("print('ran')", *flags)
    assert done.returncode in (1, 2)
    assert sentence in done.stderr
    assert "ran" not in done.stdout


RECORDED = """
    import os, sys
    from procgroup import record

    @record
    def main():
        if os.environ["RANK"] == "1":
            raise ValueError("boom")

    main()
"""


def test_the_first_failing_rank_s_error_file_is_passed_on_with_its_exit_code(launcher: Any) -> None:
    own = launcher.directory / "own.json"
    done = launcher.run(RECORDED, "-n", "2", environment={"TORCHELASTIC_ERROR_FILE": str(own)})
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("rank 1 (") :]
    assert "failed first: ValueError: boom\nTraceback (most recent call last):\n" in report
    assert "procgroup" not in report.replace(str(launcher.directory), "")
    message = json.loads(own.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: boom", 1)
    assert "in main" in message["extraInfo"]["py_callstack"]


def test_an_unmodified_script_s_failure_is_passed_on_too(launcher: Any) -> None:
    own = launcher.directory / "own.json"
    done = launcher.run("import os; os.abort()", environment={"TORCHELASTIC_ERROR_FILE": str(own)})
    assert done.returncode == 134
    assert json.loads(own.read_text())["message"]["errorCode"] == -6


def test_error_files_without_a_log_directory_leave_nothing_behind(launcher: Any) -> None:
    temporary = launcher.directory / "temporary"
    temporary.mkdir()
    done = launcher.run(RECORDED, "-n", "2", environment={"TMPDIR": str(temporary)})
    assert "failed first: ValueError: boom" in done.stderr
    assert list(temporary.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this process may not mount a file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_ends_the_logs_and_not_the_job(launcher: Any, small_disk: Path) -> None:
    source = "for number in range(2000): print(number, 'x' * 400)"
    done = launcher.run(source, "-n", "2", "--log-dir", str(small_disk))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[rank ") == 4000
    (line,) = [line for line in done.stderr.splitlines() if "No space left on device" in line]
    assert "is no longer written" in line


class OnTerminal:
    """A launcher whose output is a terminal; ``shown`` is all that it has written there."""

    def __init__(self, script: Path, *flags: str) -> None:
        self.master, slave = os.openpty()
        self.shown = ""
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
        command = [sys.executable, "-m", "procgroup", "run", *flags, str(script)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env=environment)
        os.close(slave)

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + 40
        while not re.search(pattern, self.shown):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.shown!r}"
            if select.select([self.master], [], [], 1.0)[0]:
                self.shown += os.read(self.master, 65536).decode()

    def end(self) -> int:
        with contextlib.suppress(OSError):  # EIO: no process has the terminal any more
            while data := os.read(self.master, 65536):
                self.shown += data.decode()
        return self.process.wait(40)


@pytest.fixture
def on_terminal(launcher: Any) -> Iterator[Any]:
    started: list[OnTerminal] = []

    def start(source: str, *flags: str) -> OnTerminal:
        started.append(OnTerminal(launcher.script(source), *flags))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()
        os.close(running.master)


def test_a_terminal_shows_colours_and_a_status_line_that_goes_away_at_the_end(on_terminal: Any, launcher: Any) -> None:
    source = """
        import os, pathlib, sys, time
        import procgroup
        print("begun")
        while not pathlib.Path(sys.argv[0]).with_name("over").exists():
            procgroup.report(step=int(os.environ["RANK"]) + 7, loss=0.5)
            time.sleep(0.05)
        print("done")
    """
    running = on_terminal(source, "-n", "2")
    running.wait_for("procgroup: 2 of 2 ranks up, step 7 to 8, loss 0.5")
    (launcher.directory / "over").touch()
    assert running.end() == 0
    assert "\x1b[33m[rank 1] \x1b[0mbegun\r\n" in running.shown
    assert running.shown.endswith(("\x1b[0mdone\r\n", "\r\x1b[K"))


def test_a_line_that_many_ranks_write_is_shown_once_on_a_terminal(on_terminal: Any, launcher: Any) -> None:
    source = """
        import os, pathlib, sys, time
        place = pathlib.Path(sys.argv[0]).parent
        (place / ("rank" + os.environ["RANK"])).touch()
        while len(list(place.glob("rank*"))) < 12:
            time.sleep(0.02)
        print("equal")
    """
    running = on_terminal(source, "-n", "12")
    assert running.end() == 0
    counts = [int(count) for count in re.findall(r"\(x(\d+)\) equal", running.shown)]
    assert counts and sum(counts) + running.shown.count("\x1b[0mequal") == 12
