"""The key-value space that an MPI launcher keeps for its tasks, by the PMI-1 protocol.

mpiexec of MPICH and Intel MPI gives each task a connected socket, whose descriptor is in PMI_FD. Request and answer are
one line each (source: the simple PMI of MPICH, version 1.1)::

    cmd=init pmi_version=1 pmi_subversion=1     cmd=response_to_init rc=0 ...
    cmd=get_my_kvsname                          cmd=my_kvsname kvsname=NAME
    cmd=put kvsname=NAME key=KEY value=VALUE    cmd=put_result rc=0
    cmd=barrier_in                              cmd=barrier_out     when all tasks have sent barrier_in
    cmd=get kvsname=NAME key=KEY                cmd=get_result rc=0 value=VALUE

An MPI library in this process uses the same socket, before or after. So the socket's mode is not changed (no
O_NONBLOCK), and every answer is read to its end. mpiexec ends the job when a task that has used the socket closes it
without ``finalize``. So this process sends ``finalize`` at its end, or leaves that to a loaded MPI library. srun with
--mpi=pmi2 sets PMI_FD, too, but accepts one ``init`` in a task's life, which the MPI library needs; this module is not
used there.
"""

from __future__ import annotations

import math
import os
import re
import select
import stat
import time
from contextlib import suppress
from pathlib import Path

from procgroup.errors import DistNetworkError
from procgroup.process.process_end import at_process_end

_ANSWER_SECONDS = 30.0
_LONGEST_POLL_SECONDS = 3600.0
_MAX_LINE = 65_536
_KEY = "procgroup-store"
_LAST = -1
"""Priority at this process's end: after the steps that wait for other ranks."""


def descriptor() -> int | None:
    """Return the descriptor that PMI_FD names; None without one that is open in this process and is a socket."""
    text = os.environ.get("PMI_FD", "")
    try:
        return int(text) if stat.S_ISSOCK(os.fstat(int(text)).st_mode) else None
    except (ValueError, OSError):
        return None


class KeyValueSpace:
    """The launcher's key-value space, as seen by this task. Not thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._name = ""
        self._is_in_barrier = False

    def broadcast(self, value: str | None, seconds: float) -> str:
        """Broadcast one task's text, which has no blanks; the other tasks pass None. All tasks call it, once.

        Raises TimeoutError when some task has not called it in time; the next call continues this one. Raises
        DistNetworkError when the launcher's answer is not one of PMI-1.
        """
        deadline = time.monotonic() + seconds
        name = self.open(value, deadline)
        self._barrier(deadline)
        return self._request(f"cmd=get kvsname={name} key={_KEY}", "get_result", deadline)["value"]

    def open(self, value: str | None, deadline: float) -> str:
        """Put this task's text; return the space's name, which is the same for all tasks of the job. Idempotent."""
        if not self._name:
            self._name = self._put(value, deadline)
        return self._name

    def _put(self, value: str | None, deadline: float) -> str:
        self._request("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init", deadline)
        at_process_end(self._finalize, priority=_LAST)
        name = self._request("cmd=get_my_kvsname", "my_kvsname", deadline)["kvsname"]
        if value is not None:
            self._request(f"cmd=put kvsname={name} key={_KEY} value={value}", "put_result", deadline)
        return name

    def _finalize(self) -> None:
        if self._pid != os.getpid() or _has_mpi_library():
            return
        with suppress(DistNetworkError, TimeoutError):
            self._request("cmd=finalize", "finalize_ack", math.inf)

    def _barrier(self, deadline: float) -> None:
        if not self._is_in_barrier:
            self._send("cmd=barrier_in")
            self._is_in_barrier = True
        self._receive("barrier_out", deadline)
        self._is_in_barrier = False

    def _request(self, line: str, answer: str, deadline: float) -> dict[str, str]:
        self._send(line)
        return self._receive(answer, min(deadline, time.monotonic() + _ANSWER_SECONDS))

    def _send(self, line: str) -> None:
        try:
            os.write(self._fd, f"{line}\n".encode())
        except OSError as error:
            raise DistNetworkError(
                f"the MPI launcher does not take requests on PMI_FD={self._fd}: {error}. It serves one program of "
                "each task: for more than one, set MASTER_ADDR and MASTER_PORT on all ranks."
            ) from error

    def _receive(self, command: str, deadline: float) -> dict[str, str]:
        """Return the fields of the next answer. Raises DistNetworkError unless it is the answer to this command."""
        line = self._read_line(command, deadline).decode(errors="replace")
        fields = dict(item.partition("=")[::2] for item in line.split())
        if fields.get("cmd") != command or fields.get("rc", "0") != "0":
            raise DistNetworkError(f"expected {command!r} of the MPI launcher on PMI_FD={self._fd}, got {line[:200]!r}")
        return fields

    def _read_line(self, command: str, deadline: float) -> bytes:
        line = b""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while not line.endswith(b"\n") and len(line) < _MAX_LINE:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the MPI launcher has not answered {command!r} in time")
            if not poll.poll(min(left, _LONGEST_POLL_SECONDS) * 1000):
                continue
            more = os.read(self._fd, 4096)
            if not more:
                raise DistNetworkError(f"the MPI launcher closed PMI_FD={self._fd} before it answered {command!r}")
            line += more
        return line


def _has_mpi_library() -> bool:
    """Return whether this process has loaded an MPI library, which sends ``finalize`` itself."""
    try:
        return re.search(r"/libp?mpi[^/]*\.so", Path("/proc/self/maps").read_text()) is not None
    except OSError:
        return False
