"""Which lines are shown, which are kept in which files, and what a terminal shows."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from procgroup.launch.output import log_options
from procgroup.launch.output.job_output import COLLAPSED_FROM_RANKS, JobOutput, OutputPlace
from procgroup.launch.output.log_files import JobDirectory, LineFilter, LogFile
from procgroup.launch.output.log_options import LogOptions
from procgroup.launch.output.sinks import LinePrefixer, Sink
from procgroup.launch.ranks.rank_process import OutputStream


@pytest.fixture
def sinks() -> Iterator[tuple[Sink, Sink]]:
    made = Sink(os.open(os.devnull, os.O_WRONLY)), Sink(os.open(os.devnull, os.O_WRONLY))
    yield made
    for sink in made:
        os.close(sink.descriptor)


def shown(sink: Sink) -> str:
    text = bytes(sink._pending).decode()
    sink._pending.clear()
    return text


def write(output: JobOutput, rank: int, out: str = "", err: str = "") -> None:
    """Let a rank write on its streams, and end."""
    for text, stream in zip((out, err), output.of_rank(rank, rank).streams, strict=True):
        stream.show(text.encode())
        stream.keep(text.encode())
        stream.finish()


def test_a_log_directory_keeps_every_stream_raw_and_shows_it_too(tmp_path: Path, sinks: tuple[Sink, Sink]) -> None:
    with JobOutput(LogOptions(directory=str(tmp_path)), "job", sinks) as output:
        output.begin_attempt(0, [0, 1], OutputPlace())
        assert shown(sinks[1]) == f"procgroup run: logs are kept in {tmp_path}/job\n"
        write(output, 1, "out\nno newline", "err\n")
    attempt = tmp_path / "job" / "attempt_0"
    assert (attempt / "1" / "stdout.log").read_text() == "out\nno newline"
    assert (attempt / "1" / "stderr.log").read_text() == "err\n"
    assert shown(sinks[0]) == "[rank 1] out\n[rank 1] no newline\n"
    assert shown(sinks[1]) == "[rank 1] err\n"


def test_a_later_round_erases_nothing_and_is_not_announced_again(tmp_path: Path, sinks: tuple[Sink, Sink]) -> None:
    options = LogOptions(directory=str(tmp_path))
    for text in ("first\n", "second\n"):
        with JobOutput(options, "job", sinks) as output:
            for _ in range(2):
                output.begin_attempt(0, [0], OutputPlace())
                write(output, 0, text)
            assert shown(sinks[1]).count("logs are kept in") == 1
    kept = {path.parent.parent.name: path.read_text() for path in tmp_path.glob("job/*/0/stdout.log")}
    assert kept == {
        "attempt_0": "first\n",
        "attempt_0_1": "first\n",
        "attempt_0_2": "second\n",
        "attempt_0_3": "second\n",
    }


def test_hosts_that_share_a_directory_share_the_attempt(tmp_path: Path) -> None:
    job = JobDirectory(tmp_path, "job")
    assert job.begin_attempt(3, [0, 1]).name == job.begin_attempt(3, [2, 3]).name == "attempt_3"
    assert job.begin_attempt(3, [4, 1]).name == "attempt_3_1"
    assert not (tmp_path / "job" / "attempt_3" / "4").exists()


@pytest.mark.parametrize("run_id", ["../../etc", "..", ".", "", "a/b\0c"])
def test_a_job_s_name_does_not_lead_out_of_the_directory(tmp_path: Path, run_id: str) -> None:
    assert JobDirectory(tmp_path, run_id).path.resolve().parent == tmp_path.resolve()


def test_redirected_streams_are_in_files_only_and_without_a_directory_in_a_temporary_one(
    tmp_path: Path, sinks: tuple[Sink, Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = LogOptions(redirects=log_options.streams("1:1"), tee=log_options.streams("1:2"))
    with JobOutput(options, "job", sinks) as output:
        output.begin_attempt(0, [0, 1], OutputPlace())
        place = shown(sinks[1]).split("kept in ")[1].strip()
        for rank in (0, 1):
            write(output, rank, "out\n", "err\n")
    assert sorted(path.relative_to(place).as_posix() for path in Path(place).rglob("*.log")) == [
        "attempt_0/1/stderr.log",
        "attempt_0/1/stdout.log",
    ]
    assert place.startswith(str(tmp_path))
    assert (shown(sinks[0]), shown(sinks[1])) == ("[rank 0] out\n", "[rank 0] err\n[rank 1] err\n")


def test_files_that_were_asked_for_stay_when_other_launchers_come(
    tmp_path: Path, sinks: tuple[Sink, Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with JobOutput(LogOptions(redirects=log_options.streams("3")), "job", sinks) as output:
        output.begin_attempt(0, [0], OutputPlace())
        write(output, 0, "out\n")
    with JobOutput(LogOptions(), "another", sinks):
        pass
    assert [path.read_text() for path in tmp_path.rglob("stdout.log")] == ["out\n"]


def test_redirected_streams_whose_files_cannot_be_made_are_shown(tmp_path: Path, sinks: tuple[Sink, Sink]) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "attempt_0").touch()
    with JobOutput(LogOptions(directory=str(tmp_path), redirects=log_options.streams("3")), "job", sinks) as output:
        output.begin_attempt(0, [0], OutputPlace())
        write(output, 0, "out\n")
    assert shown(sinks[0]) == "[rank 0] out\n"
    assert "is no longer written" in shown(sinks[1])


def test_the_null_device_as_directory_means_no_files_at_all(sinks: tuple[Sink, Sink]) -> None:
    options = LogOptions(directory="/dev/null", redirects=log_options.streams("3"), filters=(("x",), ()))
    with JobOutput(options, "job", sinks) as output:
        output.begin_attempt(0, [0], OutputPlace())
        assert output.of_rank(0, 0).error_file == ""
        write(output, 0, "x\n")
    assert (shown(sinks[0]), shown(sinks[1])) == ("", "")


def test_without_a_directory_error_files_are_temporary(
    tmp_path: Path, sinks: tuple[Sink, Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with JobOutput(LogOptions(), "job", sinks) as output:
        output.begin_attempt(0, [0, 7], OutputPlace())
        path = Path(output.of_rank(7, 1).error_file)
        path.write_text("{}")
        assert path.is_relative_to(tmp_path)
        assert [entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()] == [0o700]
    assert list(tmp_path.iterdir()) == []
    assert shown(sinks[1]) == ""


def test_where_no_temporary_file_can_be_made_there_are_no_error_files(
    sinks: tuple[Sink, Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/proc/nowhere")
    with JobOutput(LogOptions(), "job", sinks) as output:
        output.begin_attempt(0, [0], OutputPlace())
        assert output.of_rank(0, 0).error_file == ""
    with pytest.raises(FileNotFoundError):
        JobOutput(LogOptions(redirects=log_options.streams("3")), "job", sinks)


def test_lines_with_one_of_the_words_are_also_kept_together(tmp_path: Path, sinks: tuple[Sink, Sink]) -> None:
    options = LogOptions(str(tmp_path), filters=(("loss", "acc"), ()), shown_ranks=frozenset([0]))
    with JobOutput(options, "job", sinks) as output:
        output.begin_attempt(0, [0, 1], OutputPlace())
        write(output, 0, "loss 1\nother\nacc")
        write(output, 1, "a loss\n", "loss on stderr\n")
        output.finish()
    kept = (tmp_path / "job" / "attempt_0" / "filtered_stdout.log").read_text()
    assert kept == "[rank 0] loss 1\n[rank 0] acc\n[rank 1] a loss\n"
    assert not (tmp_path / "job" / "attempt_0" / "filtered_stderr.log").exists()
    assert "a loss" not in shown(sinks[0])


def test_a_line_is_filtered_whole_however_it_is_cut_into_reads(tmp_path: Path) -> None:
    failures: list[OSError] = []
    log = LogFile(tmp_path / "log", lambda path, error: failures.append(error))
    lines = LineFilter(["needle"], "> ", log)
    for byte in b"hay\nneedle one\nhay needle":
        lines.feed(bytes([byte]))
    lines.finish()
    log.close()
    assert (tmp_path / "log").read_text() == "> needle one\n> hay needle\n"
    assert failures == []


def test_a_full_disk_is_said_once_and_the_output_goes_on(tmp_path: Path, sinks: tuple[Sink, Sink]) -> None:
    with JobOutput(LogOptions(directory=str(tmp_path)), "job", sinks) as output:
        output.begin_attempt(0, [0, 1], OutputPlace())
        shown(sinks[1])
        for rank in range(2):
            (tmp_path / "job" / "attempt_0" / str(rank) / "stdout.log").symlink_to("/dev/full")
        streams = [output.of_rank(rank, rank).streams for rank in range(2)]
        for text in (b"one\n", b"two\n"):
            for stream, _ in streams:
                stream.show(text)
                stream.keep(text)
        for stream in (*streams[0], *streams[1]):
            stream.finish()
    assert shown(sinks[0]) == "[rank 0] one\n[rank 1] one\n[rank 0] two\n[rank 1] two\n"
    (line,) = shown(sinks[1]).splitlines()
    assert line.startswith(f"procgroup run: {tmp_path}/job/attempt_0/0/stdout.log is no longer written: No space left")


def test_a_directory_that_cannot_be_made_is_an_error_at_the_start_and_a_line_later(
    tmp_path: Path, sinks: tuple[Sink, Sink]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        JobOutput(LogOptions(directory=str(tmp_path / "file")), "job", sinks)
    with JobOutput(LogOptions(directory=str(tmp_path / "logs")), "job", sinks) as output:
        output.begin_attempt(0, [0], OutputPlace())
        shown(sinks[1])
        (tmp_path / "logs").rename(tmp_path / "moved")
        (tmp_path / "logs").touch()
        output.begin_attempt(1, [0], OutputPlace())
        write(output, 0, "still shown\n")
    assert shown(sinks[0]) == "[rank 0] still shown\n"
    assert "is no longer written: Not a directory" in shown(sinks[1])


def test_a_stream_keeps_the_end_of_what_its_rank_wrote(sinks: tuple[Sink, Sink], tmp_path: Path) -> None:
    with JobOutput(LogOptions(redirects=log_options.streams("3")), "job", sinks) as output:
        output.begin_attempt(0, [0], OutputPlace())
        read_end, write_end = os.pipe()
        out, err = output.of_rank(0, 0).streams
        out.finish()
        stream = OutputStream(read_end, err)
        os.write(write_end, b"hidden, and yet evidence\n")
        assert stream.read_some()
        os.close(write_end)
        stream.close()
    assert bytes(stream.tail) == b"hidden, and yet evidence\n"


class Terminal:
    """A terminal of 40 columns, and what its screen shows: carriage returns and erased lines are carried out."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
        self.sink = Sink(self.slave)
        self.raw = b""

    def screen(self) -> list[str]:
        while self.sink.pending:
            self.sink.write_some()
        end = b"\x06"  # a read may return a part of what was written before
        os.write(self.slave, end)
        while not self.raw.endswith(end):
            self.raw += os.read(self.master, 1 << 16)
        self.raw = self.raw.removesuffix(end)
        lines = self.raw.decode().replace("\r\n", "\n").replace("\r\x1b[K", "\0").split("\n")
        return [line.rpartition("\0")[2].rpartition("\r")[2] for line in lines]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    os.close(made.master)
    os.close(made.slave)


def test_the_status_line_stays_below_the_lines_of_the_ranks(terminal: Terminal) -> None:
    lines = LinePrefixer("[rank 0] ", terminal.sink)
    terminal.sink.show_status("procgroup: 1 of 1 ranks up")
    assert terminal.screen() == ["procgroup: 1 of 1 ranks up"]
    lines.feed(b"one\n")
    assert terminal.screen() == ["[rank 0] one", "procgroup: 1 of 1 ranks up"]
    terminal.sink.show_status("changed")
    lines.feed(b"two\nthree\n")
    assert terminal.screen() == ["[rank 0] one", "[rank 0] two", "[rank 0] three", "changed"]
    terminal.sink.show_status("")
    assert terminal.screen() == ["[rank 0] one", "[rank 0] two", "[rank 0] three", ""]


def test_a_progress_bar_takes_the_place_of_the_status_line_while_it_is_drawn(terminal: Terminal) -> None:
    lines = LinePrefixer("[rank 0] ", terminal.sink)
    terminal.sink.show_status("status")
    lines.feed(b"\r 10%")
    terminal.sink.show_status("new status")
    assert terminal.screen() == ["[rank 0]  10%"]
    lines.feed(b"\r100%\n")
    assert terminal.screen() == ["[rank 0] 100%", "new status"]


def test_a_status_line_never_wraps(terminal: Terminal) -> None:
    terminal.sink.show_status("x" * 100)
    assert terminal.screen() == ["x" * 39]


def test_a_sink_that_is_no_terminal_has_no_status_line(sinks: tuple[Sink, Sink]) -> None:
    sinks[1].show_status("status")
    assert shown(sinks[1]) == ""


def wait_until_due(output: JobOutput, is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_over():
        assert time.monotonic() < deadline
        due = output.due
        time.sleep(0.01 if due is None else min(0.05, max(0.0, due - time.monotonic())))
        output.tick()


def test_a_job_on_a_terminal_shows_its_status_after_a_moment(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JobOutput(LogOptions(), "job", (terminal.sink, terminal.sink)) as output:
        assert output.due is None
        output.status.count(2, 2, 0)
        output.tick()
        assert terminal.screen() == [""]
        assert output.progress is not None and output.progress.address
        wait_until_due(output, lambda: terminal.screen() == ["procgroup: 2 of 2 ranks up"])
        assert output.due is None
        output.finish()
        output.tick()
        assert terminal.screen() == [""]
        assert output.due is None


def test_each_rank_has_a_colour_of_its_own_on_a_terminal_only(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with JobOutput(LogOptions(directory=str(tmp_path)), "job", (terminal.sink, terminal.sink)) as output:
        output.begin_attempt(0, [0, 1], OutputPlace())
        write(output, 0, "a\n")
        write(output, 1, "b\n")
        lines = terminal.screen()[1:3]
    assert lines == ["\x1b[36m[rank 0] \x1b[0ma", "\x1b[33m[rank 1] \x1b[0mb"]
    assert (tmp_path / "job" / "attempt_0" / "0" / "stdout.log").read_text() == "a\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_is_used_where_none_is_wanted(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with JobOutput(LogOptions(), "job", (terminal.sink, terminal.sink)) as output:
        output.begin_attempt(0, [0], OutputPlace())
        write(output, 0, "a\n")
        assert terminal.screen()[0] == "[rank 0] a"


def test_the_prefix_has_what_the_template_names(sinks: tuple[Sink, Sink]) -> None:
    place = OutputPlace(nodes=2, node_rank=1, host="beta", role="trainer")
    for template, expected in [(None, "[rank 9 beta] x\n"), ("{role}{local_rank}@{node_rank}: ", "trainer9@1: x\n")]:
        with JobOutput(LogOptions(prefix=template), "job", sinks) as output:
            output.begin_attempt(0, [9], place)
            write(output, 9, "x\n")
            assert shown(sinks[0]) == expected


@pytest.mark.parametrize(
    ("collapse", "ranks", "is_collapsed"),
    [("auto", COLLAPSED_FROM_RANKS, True), ("auto", 8, False), ("always", 2, True), ("never", 64, False)],
)
def test_equal_lines_are_collapsed_on_a_terminal_with_many_ranks(
    terminal: Terminal, collapse: str, ranks: int, is_collapsed: bool
) -> None:
    with JobOutput(LogOptions(collapse=collapse), "job", (terminal.sink, terminal.sink)) as output:
        output.begin_attempt(0, range(ranks), OutputPlace())
        for rank in range(ranks):
            write(output, rank, "epoch 1\n")
        output.finish()
        assert any("(x" in line for line in terminal.screen()) == is_collapsed


def test_a_line_that_waits_for_other_ranks_is_shown_before_the_next_attempt(sinks: tuple[Sink, Sink]) -> None:
    with JobOutput(LogOptions(collapse="always"), "job", sinks) as output:
        output.begin_attempt(0, [0, 1], OutputPlace())
        write(output, 0, "alone\n")
        output.begin_attempt(1, [0, 1], OutputPlace())
        assert shown(sinks[0]) == "[rank 0] alone\n"


def test_a_file_gets_every_line_unless_it_is_asked_otherwise(sinks: tuple[Sink, Sink]) -> None:
    with JobOutput(LogOptions(), "job", sinks) as output:
        output.begin_attempt(0, range(64), OutputPlace())
        for rank in range(64):
            write(output, rank, "epoch 1\n")
    assert shown(sinks[0]).count("epoch 1\n") == 64


def test_the_prefixes_that_ranks_write_themselves_are_removed(sinks: tuple[Sink, Sink]) -> None:
    with JobOutput(LogOptions(), "job", sinks) as output:
        output.begin_attempt(0, [0, 1], OutputPlace())
        write(output, 1, "[rank1]: Traceback\n[rank1]:W1128 10:00:00 of torch's log\n[rank0]:W1128 of another\n")
    assert shown(sinks[0]) == (
        "[rank 1] Traceback\n[rank 1] W1128 10:00:00 of torch's log\n[rank 1] [rank0]:W1128 of another\n"
    )
