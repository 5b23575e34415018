"""The key-value space of mpiexec, where that is slow, gone, or another program. With real ones: test_launchers.py."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from procgroup.cluster import pmi
from procgroup.errors import DistNetworkError


@pytest.fixture
def launcher() -> Iterator[tuple[socket.socket, pmi.KeyValueSpace]]:
    """The launcher's end of a task's socket, and the task's key-value space."""
    theirs, mine = socket.socketpair()
    with theirs, mine:
        yield theirs, pmi.KeyValueSpace(mine.fileno())


def answer(theirs: socket.socket, *lines: str, requests: list[str] | None = None) -> threading.Thread:
    """Answer one request with each line, in a thread; keep the requests."""

    def run() -> None:
        with theirs.makefile("r") as asked:
            for line in lines:
                request = asked.readline()
                if requests is not None:
                    requests.append(request.strip())
                theirs.sendall(line.encode())

    thread = threading.Thread(target=run)
    thread.start()
    return thread


OPENED = ("cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n", "cmd=my_kvsname kvsname=kvs_1\n")
FOUND = "cmd=get_result rc=0 value=1,2\n"


def test_a_value_goes_from_one_task_to_all(launcher: tuple[socket.socket, pmi.KeyValueSpace]) -> None:
    theirs, space = launcher
    answering = answer(theirs, *OPENED, "cmd=put_result rc=0\n", "cmd=barrier_out rc=0\n", FOUND)
    assert space.broadcast("1,2", 10) == "1,2"
    answering.join()


def test_a_task_that_does_not_come_ends_the_wait_and_a_later_call_goes_on_with_it(
    launcher: tuple[socket.socket, pmi.KeyValueSpace],
) -> None:
    theirs, space = launcher
    requests: list[str] = []
    answering = answer(theirs, *OPENED, "", requests=requests)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="barrier_out"):
        space.broadcast(None, 0.3)
    assert 0.3 <= time.monotonic() - started < 10
    answering.join()
    theirs.sendall(b"cmd=barrier_out\n")
    answering = answer(theirs, FOUND, requests=requests)
    assert space.broadcast(None, 10) == "1,2"
    answering.join()
    assert requests[2:] == ["cmd=barrier_in", "cmd=get kvsname=kvs_1 key=procgroup-store"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("SSH-2.0-OpenSSH\n", "expected 'response_to_init' of the MPI launcher on PMI_FD"),
        ("cmd=response_to_init rc=-1\n", "got 'cmd=response_to_init rc=-1"),
    ],
)
def test_what_is_no_answer_is_shown(line: str, text: str, launcher: tuple[socket.socket, pmi.KeyValueSpace]) -> None:
    theirs, space = launcher
    answering = answer(theirs, line)
    with pytest.raises(DistNetworkError, match=text):
        space.broadcast(None, 10)
    answering.join()


def test_a_launcher_that_is_gone_is_reported(launcher: tuple[socket.socket, pmi.KeyValueSpace]) -> None:
    theirs, space = launcher
    theirs.close()
    with pytest.raises(DistNetworkError, match="It serves one program of each task"):
        space.broadcast(None, 10)


def test_a_descriptor_that_is_no_open_socket_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryFile() as file:
        for text in ("", "x", "-1", str(file.fileno()), "1000000"):
            monkeypatch.setenv("PMI_FD", text)
            assert pmi.descriptor() is None
    theirs, mine = socket.socketpair()
    with theirs, mine:
        monkeypatch.setenv("PMI_FD", str(mine.fileno()))
        assert pmi.descriptor() == mine.fileno()
        assert os.get_blocking(mine.fileno())
