"""Completion: what may stand in the place of a word, and that bash, zsh and fish complete with it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from procgroup.__main__ import COMMANDS
from procgroup.completion.command import SCRIPTS, candidates, main
from procgroup.launch import flags
from world import run_command

SHELLS = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}


def words(*typed: str) -> list[str]:
    return [candidate.word for candidate in candidates(typed)]


def test_commands_are_completed() -> None:
    assert words("procgroup", "") == words("procgroup") == list(COMMANDS)
    assert words("/venv/bin/procgroup", "la") == ["launch"]
    assert words("procgroup", "completion", "") == ["bash", "zsh", "fish"]


def test_every_flag_is_completed_and_described() -> None:
    assert words("procgroup", "run", "--") == [flag.name for flag in flags.table("")]
    assert words("pgrun", "--node_r") == ["--node-rank"]
    assert words("procgroup", "launch", "--use") == ["--use-env"]
    assert "--use-env" not in words("procgroup", "run", "--")
    assert all(candidate.text for candidate in candidates(["procgroup", "run", "--"]))


def test_the_flags_of_diagnostics_are_completed() -> None:
    assert words("procgroup", "explain", "--") == ["--list", "--json", "--html", "--trace", "--otlp"]
    assert words("procgroup", "top", "--") == ["--once", "--web", "--port", "--open"]
    assert words("procgroup", "doctor", "--") == ["--json", "--strict", "--verbose", "--timeout"]
    assert words("procgroup", "doctor", "--json", "--s") == ["--strict"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["--numa-binding", "ex"], ["exclusive"]),
        (["--numa_binding", "core"], ["core-complex", "cores"]),
        (["--bind", "n"], ["node"]),
        (["--numa-binding=co"], ["--numa-binding=core-complex", "--numa-binding=cores"]),
        (["--on-partition", ""], ["continue", "stop"]),
        (["-n", ""], ["auto", "cpu", "gpu"]),
        (["--standalone", "--rdzv-backend=c"], ["--rdzv-backend=c10d"]),
        (["--nnodes", ""], []),
        (["--log-dir", "/t"], []),
    ],
)
def test_the_value_of_a_flag_is_completed(typed: list[str], expected: list[str]) -> None:
    assert words("procgroup", "run", *typed) == expected


@pytest.mark.parametrize(
    "typed", [["a.py", "--"], ["-n", "2", "a.py", "-"], ["--standalone", "a.py", "--bind", ""], []]
)
def test_the_script_and_its_arguments_are_the_shell_s(typed: list[str]) -> None:
    assert words("pgrun", *(typed or ["train"])) == []


def test_the_words_are_printed_with_their_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["words", "procgroup", "run", "--max-r"]) == 0
    assert capsys.readouterr().out == "--max-restarts\thow often the job may start its ranks again\n"


@pytest.mark.parametrize(("typed", "status"), [(["--help"], 0), ([], 2), (["tcsh"], 2)])
def test_another_shell_is_answered_with_the_usage(
    typed: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == status
    assert "usage: procgroup completion {bash,zsh,fish}" in capsys.readouterr().err


@pytest.fixture
def path_with_procgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put programs procgroup and pgrun of this interpreter on the path, and go to a folder with a script."""
    (tmp_path / "bin").mkdir()
    for name, command in (("procgroup", ""), ("pgrun", " run")):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m procgroup{command} "$@"\n')
        program.chmod(0o755)
    (tmp_path / "training_script.py").touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(flags.__file__).parents[2]))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Terminal:
    """An interactive shell, at a terminal of its own."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self._pid = pid
        self._descriptor = descriptor
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, pattern: str, timeout: float = 120) -> None:
        """Wait until the terminal shows what matches ``pattern``, and forget all before its end."""
        deadline = time.monotonic() + timeout
        while (found := re.search(pattern, self._shown)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} is not in {self._shown!r}"
            if select.select([self._descriptor], [], [], left)[0]:
                self._shown += os.read(self._descriptor, 65536).decode(errors="replace")
        self._shown = self._shown[found.end() :]

    def close(self) -> None:
        os.close(self._descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


@contextlib.contextmanager
def terminal(shell: str) -> Iterator[Terminal]:
    """Start a shell in which completion is set up as its script says."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.execvp(shell, SHELLS[shell])
    opened = Terminal(pid, descriptor)
    try:
        before = "autoload -Uz compinit; compinit -D; " if shell == "zsh" else ""
        opened.type(f'{before}eval "$(procgroup completion {shell})"; echo set""up\n')
        opened.wait_for("setup\r")
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_what_is_typed(shell: str, path_with_procgroup: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    with terminal(shell) as opened:
        for typed, completed in {
            "procgroup comp": "procgroup completion ",
            "procgroup run --numa-b": "procgroup run --numa-binding ",
            "procgroup run --numa-binding=ex": "procgroup run --numa-binding=exclusive ",
            "pgrun --bind core-": "pgrun --bind core-complex ",
            "procgroup run -n 2 train": "procgroup run -n 2 training_script.py ",
            f"{path_with_procgroup}/bin/pgrun --max-r": "/bin/pgrun --max-restarts ",
        }.items():
            opened.type(f"{typed}\t")
            opened.wait_for(re.escape(completed))
            opened.type("\x15")


def test_fish_completes_what_is_typed(path_with_procgroup: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    for typed, completed in {
        "procgroup comp": "completion",
        "procgroup run --numa-b": "--numa-binding",
        "procgroup run --numa-binding=ex": "--numa-binding=exclusive",
        "pgrun --bind core-": "core-complex",
        "procgroup run -n 2 train": "training_script.py",
    }.items():
        source = f"procgroup completion fish | source; complete --do-complete {typed!r}"
        done = run_command(["fish", "--no-config", "-c", source], directory=path_with_procgroup)
        assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [completed], done.stderr


@pytest.mark.parametrize("shell", list(SCRIPTS))
def test_the_shell_can_read_its_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(SCRIPTS[shell])
    assert run_command([shell, "-n", str(tmp_path / "script")]).returncode == 0
