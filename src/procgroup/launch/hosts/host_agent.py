"""One host's agent, as seen from the command: its ssh process, its output, and the channel to it.

::

    connecting ──READY──> ready ──begin──> running ──the process ends──> ended
        └──────────────────the process ends──────────────────────────────^
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from procgroup.cluster.addresses import Host
from procgroup.launch.hosts.agent_channel import MAX_LINE_BYTES, READY, Assignment, Ready
from procgroup.launch.output.sinks import LinePrefixer, PipeReader, Sink

_TAIL_BYTES = 4096
_SSH_FAILED = 255


class AgentOutput(PipeReader):
    """One stream of an agent. Its lines already have a prefix once the agent is ready.

    Earlier lines come from ssh, the login shell or Python, and are shown on ``early_sink`` with the host's name.
    ``answer`` is the line by which the agent reports that it is ready.
    """

    def __init__(self, descriptor: int, host: str, sink: Sink, early_sink: Sink) -> None:
        super().__init__(descriptor, sink)
        self.answer: bytes = b""
        self.tail: bytes = b""
        self._host = host
        self._unread = b""
        self._lines: LinePrefixer = LinePrefixer(f"[{host}] ", early_sink)
        self._is_agents = False

    def begin(self) -> None:
        """Show further lines unchanged."""
        if not self._is_agents:
            self._is_agents = True
            self._lines.finish()
            self._lines = _AgentLines(self._host, self.sink)
            self._lines.feed(self._unread)
            self._unread = b""

    def _finish(self) -> None:
        self._lines.feed(self._unread)
        self._lines.finish()

    def _take(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        if self._is_agents or self.answer:
            self._lines.feed(data)
            return
        self._unread += data
        while not self.answer and (b"\n" in self._unread or len(self._unread) > MAX_LINE_BYTES):
            line, _, self._unread = self._unread.partition(b"\n")
            if line.startswith(READY):
                self.answer = line
                self._lines.feed(self._unread)
                self._unread = b""
            else:
                self._lines.feed(line + b"\n")


class _AgentLines(LinePrefixer):
    """Inserts the host's name into the agent's own lines; lines of its ranks pass unchanged."""

    _OWN = re.compile(rb"^procgroup run: ", re.MULTILINE)

    def __init__(self, host: str, sink: Sink) -> None:
        super().__init__("", sink)
        self._named = f"procgroup run: {host}: ".encode().replace(b"\\", rb"\\")

    def _show_lines(self, text: bytes) -> None:
        super()._show_lines(self._OWN.sub(self._named, text))


class HostAgent:
    """The process that runs an agent on a host, in a session of its own, which a terminal's Ctrl-C does not reach."""

    def __init__(self, host: Host, command: Sequence[str], assignment: Assignment, sinks: tuple[Sink, Sink]) -> None:
        self.host = host
        self.ready: Ready | None = None
        self.status: int | None = None
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        try:
            self.descriptor: int = os.pidfd_open(self._process.pid)  # readable once the process has ended
            pipes = self._process.stdin, self._process.stdout, self._process.stderr
            channel, out, err = (os.dup(pipe.fileno()) for pipe in pipes if pipe is not None)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        for pipe in pipes:
            if pipe is not None:
                pipe.close()
        os.set_blocking(channel, False)
        self.channel: Sink = Sink(channel)
        self._out = AgentOutput(out, host.name, sinks[0], sinks[1])
        self._err = AgentOutput(err, host.name, sinks[1], sinks[1])
        self.channel.put_lines(None, assignment.to_line())

    @property
    def streams(self) -> list[AgentOutput]:
        """The streams that are still open."""
        return [stream for stream in (self._out, self._err) if stream.open]

    @property
    def was_lost(self) -> bool:
        """Whether the connection may have ended rather than the agent: ssh exits with 255 then, as a rank may, too."""
        return self.status is not None and (self.status < 0 or self.status == _SSH_FAILED)

    def read_answer(self) -> bool:
        """Return whether the agent has just become ready. Raises ValueError for an invalid answer."""
        if self.ready is None and self._out.answer:
            self.ready = Ready.from_line(self._out.answer)
            return True
        return False

    def begin(self, endpoint: str) -> None:
        """Send the endpoint at which the agents meet; the agent then starts its ranks."""
        self._out.begin()
        self._err.begin()
        self.channel.put_lines(None, f"{endpoint}\n".encode())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the agent; does nothing when it has ended."""
        self.channel.put_lines(None, f"{number.name}\n".encode())

    def kill(self) -> None:
        """Kill the process; an agent on another host then ends itself within seconds."""
        if self.status is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def reap(self) -> bool:
        """Return whether the process has ended since the last call; if so, read the rest of its output."""
        if self.status is not None or self._process.poll() is None:
            return False
        self.status = self._process.returncode
        os.close(self.descriptor)
        for stream in self.streams:
            stream.drain()
        self.channel.broken = True
        os.close(self.channel.descriptor)
        return True

    def describe_loss(self) -> str:
        """Describe the end of an agent that ``was_lost``."""
        if self.host.is_local or self.status != _SSH_FAILED:
            return f"the process for {self.host.name} ended with status {self.status}"
        return f"ssh to {self.host.name} ended with status 255: the connection was lost, or it is a rank's exit status"

    def describe_failed_start(self, python: str) -> str:
        """Describe why the process ended before the agent was ready."""
        name, text = self.host.name, self._err.tail.decode(errors="replace")
        if self.status == _SSH_FAILED and not self.host.is_local:
            last = text.strip().rpartition("\n")[2]
            return f"cannot reach {name} by ssh: {last or 'ssh ended with status 255'}"
        if self.status in (126, 127):
            return f"{name} has no interpreter {python} that can be executed: name the one there by --remote-python"
        if "No module named" in text:
            return f"{python} on {name} has no procgroup: install it there, or name another one by --remote-python"
        return f"the agent on {name} ended with status {self.status} before it was ready"
