"""What the ranks write arrives whole, prefixed, on the right stream, with nothing lost."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from typing import Any

import pytest

from procgroup.launch.output.sinks import MAX_LINE_BYTES, LinePrefixer, Sink
from procgroup.launch.ranks.rank_process import InterruptFilter
from world import run_command


class Shown:
    """A sink on a pipe, and the prefixers of two ranks on it."""

    def __init__(self) -> None:
        self.read_end, write_end = os.pipe()
        self.sink = Sink(write_end)
        self.ranks = [LinePrefixer(f"[rank {rank}] ", self.sink) for rank in range(2)]

    def text(self) -> bytes:
        shown = b""
        while self.sink.pending:
            self.sink.write_some()
            shown += os.read(self.read_end, 1 << 16)
        return shown


@pytest.fixture
def shown() -> Any:
    made = Shown()
    yield made
    os.close(made.read_end)
    os.close(made.sink.descriptor)


def test_a_line_is_shown_when_it_is_whole(shown: Shown) -> None:
    shown.ranks[0].feed(b"half")
    assert shown.text() == b""
    shown.ranks[1].feed(b"other\n")
    shown.ranks[0].feed(b" and half\nnext")
    assert shown.text() == b"[rank 1] other\n[rank 0] half and half\n"
    shown.ranks[0].finish()
    assert shown.text() == b"[rank 0] next\n"


def test_empty_lines_keep_their_place(shown: Shown) -> None:
    shown.ranks[0].feed(b"\n\na\n\n")
    assert shown.text() == b"[rank 0] \n[rank 0] \n[rank 0] a\n[rank 0] \n"


def test_bytes_that_are_no_text_and_characters_cut_by_a_read_pass_unchanged(shown: Shown) -> None:
    for byte in "grüße 🙂\n".encode() + b"\xff\xfe\x00\n":
        shown.ranks[0].feed(bytes([byte]))
    assert shown.text() == b"[rank 0] " + "grüße 🙂\n".encode() + b"[rank 0] \xff\xfe\x00\n"


def test_a_progress_bar_redraws_itself_behind_its_prefix(shown: Shown) -> None:
    for text in (b"\r 10%", b"\r 20%", b"\r100%\n"):
        shown.ranks[0].feed(text)
        assert shown.text() == text.replace(b"\r", b"\r[rank 0] ")


def test_a_progress_bar_that_returns_at_its_end_keeps_its_prefix(shown: Shown) -> None:
    shown.ranks[0].feed(b"10%\r")
    assert shown.text() == b"[rank 0] 10%\r"
    shown.ranks[0].feed(b"20%\r")
    assert shown.text() == b"[rank 0] 20%\r"
    shown.ranks[0].feed(b"\n")
    assert shown.text() == b"\n"


def test_another_rank_s_line_does_not_tear_a_progress_bar(shown: Shown) -> None:
    shown.ranks[0].feed(b"\r 10%")
    shown.ranks[1].feed(b"hello\n")
    shown.ranks[0].feed(b"\r 20%")
    assert shown.text() == b"\r[rank 0]  10%\n[rank 1] hello\n\r[rank 0]  20%"


def test_a_second_progress_bar_waits_for_its_end_and_loses_nothing(shown: Shown) -> None:
    shown.ranks[0].feed(b"\r 10%")
    shown.ranks[1].feed(b"\r 50%")
    assert shown.text() == b"\r[rank 0]  10%"
    shown.ranks[1].feed(b"\r100%\n")
    assert shown.text() == b"\n\r[rank 1]  50%\r[rank 1] 100%\n"


def test_windows_line_ends_stay(shown: Shown) -> None:
    shown.ranks[0].feed(b"a\r\nb\r")
    shown.ranks[0].feed(b"\n")
    assert shown.text() == b"[rank 0] a\r\n[rank 0] b\r\n"


def test_a_line_without_end_is_bounded_and_complete(shown: Shown) -> None:
    line = "ü".encode() * (MAX_LINE_BYTES + 3)
    for start in range(0, len(line), 65536):
        shown.ranks[0].feed(line[start : start + 65536])
    shown.ranks[0].finish()
    pieces = shown.text().splitlines()
    assert all(len(piece) <= MAX_LINE_BYTES + len("[rank 0] ") for piece in pieces)
    assert b"".join(piece.removeprefix(b"[rank 0] ") for piece in pieces) == line
    assert all(piece.decode() for piece in pieces)


def test_a_sink_whose_reader_is_gone_takes_no_more(shown: Shown) -> None:
    read_end, write_end = os.pipe()
    sink = Sink(write_end)
    os.close(read_end)
    sink.put_lines(None, b"x\n")
    sink.write_some()
    sink.put_lines(None, b"y\n")
    assert (sink.broken, sink.pending) == (True, 0)
    os.close(write_end)


@pytest.mark.parametrize("seed", range(5))
def test_any_cut_into_reads_gives_the_same_lines(shown: Shown, seed: int) -> None:
    chance = random.Random(seed)
    text = b"".join(chance.choice([b"a", b"bc", b"\n", "é".encode()]) for _ in range(400)) + b"\n"
    at = 0
    while at < len(text):
        step = chance.randint(1, 9)
        shown.ranks[0].feed(text[at : at + step])
        at += step
    assert shown.text() == b"".join(b"[rank 0] " + line + b"\n" for line in text.split(b"\n")[:-1])


def test_stdout_and_stderr_stay_apart(launcher: Any) -> None:
    done = launcher.run("import sys; print('to out'); print('to err', file=sys.stderr)", "--nproc-per-node", "2")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] to out", "[rank 1] to out"]
    assert sorted(line for line in done.stderr.splitlines() if "rank" in line and "to" in line)[-2:] == [
        "[rank 0] to err",
        "[rank 1] to err",
    ]


def test_ten_megabytes_of_four_ranks_arrive_whole(launcher: Any) -> None:
    source = """
        import os, random, sys
        rank = int(os.environ["RANK"])
        chance = random.Random(rank)
        lines = [f"{number} " + "x" * chance.randint(0, 400) + "\\n" for number in range(12_500)]
        sys.stdout.write("".join(lines))
    """
    done = launcher.run(source, "--nproc-per-node", "4")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 10_000_000
    for rank in range(4):
        chance = random.Random(rank)
        expected = [f"{number} " + "x" * chance.randint(0, 400) for number in range(12_500)]
        prefix = f"[rank {rank}] "
        got = [line.removeprefix(prefix) for line in done.stdout.splitlines() if line.startswith(prefix)]
        assert hashlib.sha1("\n".join(got).encode()).digest() == hashlib.sha1("\n".join(expected).encode()).digest()


def test_lines_stay_whole_when_stdout_and_stderr_are_one_pipe(launcher: Any) -> None:
    script = launcher.script("""
        import sys
        for number in range(3000):
            print("out", "o" * 300, number)
            print("err", "e" * 300, number, file=sys.stderr)
    """)
    flags = f"{sys.executable} -m procgroup run --nproc-per-node 2 {script} 2>&1 | cat"
    done = run_command(["sh", "-c", flags])
    lines = [line for line in done.stdout.splitlines() if line.startswith("[rank")]
    assert len(lines) == 12_000
    assert all(len(line.split()) == 5 and line.split()[3] in ("o" * 300, "e" * 300) for line in lines)


@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_what_was_written_before_the_end_is_shown_without_newline_too(launcher: Any, end: str) -> None:
    done = launcher.run(f"import os, sys\nsys.stdout.write('no newline')\nsys.stderr.write('here')\n{end}")
    assert "[rank 0] no newline\n" in done.stdout
    assert "[rank 0] here\n" in done.stderr


def test_rank_0_reads_the_launcher_s_stdin_and_the_others_find_it_empty(launcher: Any) -> None:
    done = launcher.run("import sys; print(repr(sys.stdin.read()))", "--nproc-per-node", "2", standard_input="words")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 'words'", "[rank 1] ''"]


def test_a_background_process_that_keeps_the_pipe_open_does_not_hold_the_launcher(launcher: Any) -> None:
    source = """
        import subprocess
        print("child", subprocess.Popen(["sleep", "58"], start_new_session=True).pid)
    """
    done = launcher.run(source, timeout=40)
    assert done.returncode == 0
    os.kill(int(done.stdout.split()[-1]), 9)


def test_logs_are_kept_raw_per_rank_and_the_place_is_said(launcher: Any) -> None:
    source = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    logs = launcher.directory / "logs"
    done = launcher.run(source, "--nproc-per-node", "2", "--log-dir", str(logs), "--rdzv-id", "job")
    attempt = logs / "job" / "attempt_0"
    assert done.stderr.count(str(logs / "job")) == 1
    for rank in range(2):
        assert (attempt / str(rank) / "stdout.log").read_text() == f"out {rank}\n"
        assert (attempt / str(rank) / "stderr.log").read_text() == "err\n"
    assert "[rank 1] out 1\n" in done.stdout


INTERRUPTED = b'Traceback (most recent call last):\n  File "/a/train.py", line 31, in f\n    x()\nKeyboardInterrupt\n'


def test_an_interrupt_is_shortened_to_one_line_and_nothing_else_is() -> None:
    filter_ = InterruptFilter()
    assert filter_.feed(INTERRUPTED) == INTERRUPTED
    filter_.active = True
    assert filter_.feed(b"saving\nTrace") == b"saving\n"
    assert filter_.feed(INTERRUPTED[5:]) == b""
    assert filter_.finish() == b"KeyboardInterrupt at /a/train.py, line 31\n"
    other = INTERRUPTED.replace(b"KeyboardInterrupt", b"OSError: disk full")
    assert filter_.feed(other) + filter_.finish() == other
    endless = INTERRUPTED[:40] + b"x" * 100_000
    assert filter_.feed(endless) == endless


def test_a_prefix_of_the_ranks_own_is_not_said_twice() -> None:
    sink = Sink(os.open(os.devnull, os.O_WRONLY))
    lines = LinePrefixer("[rank 1] ", sink, own_prefix="[rank1]:")
    lines.feed(b"[rank1]: Traceback (most recent call last):\n[rank1]:   File\nmine [rank1]: \n[rank2]: other\n")
    lines.feed(b"[rank1]: Value")
    lines.feed(b"Error\n")
    assert bytes(sink._pending).splitlines() == [
        b"[rank 1] Traceback (most recent call last):",
        b"[rank 1]   File",
        b"[rank 1] mine [rank1]: ",
        b"[rank 1] [rank2]: other",
        b"[rank 1] ValueError",
    ]
    os.close(sink.descriptor)


def test_an_interrupt_with_the_rank_before_each_line_is_shortened_too() -> None:
    filter_ = InterruptFilter()
    filter_.active = True
    prefixed = b"".join(b"[rank0]: " + line for line in INTERRUPTED.splitlines(keepends=True))
    shown = filter_.feed(prefixed) + filter_.finish()
    assert shown == b"[rank0]: KeyboardInterrupt at /a/train.py, line 31\n"
