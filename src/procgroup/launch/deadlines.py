"""How long the launcher and ``spawn`` wait for processes to end, and the steps that follow."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

INTERRUPT_SECONDS = 2.0
"""From Ctrl-C to SIGKILL, without --shutdown-timeout."""

SHUTDOWN_SECONDS = 30.0
"""From SIGTERM to SIGKILL, without --shutdown-timeout."""

UNKILLABLE_SECONDS = 30.0
"""From SIGKILL until the wait for a process ends that hangs in the kernel."""

REPORT_SECONDS = 2.0
"""How long the other ranks may take, after the first failure, to raise errors of their own, when no restart is left."""

RESTART_REPORT_SECONDS = 0.3
"""The same when the ranks will be started again."""

CAUSE_SECONDS = 1.5
"""How long to wait for the failure of a rank that all known failures blame."""


def shutdown_seconds(timeout: float | None, number: signal.Signals = signal.SIGTERM) -> float:
    """Return the seconds from a signal to SIGKILL: those of ``--shutdown-timeout``, or a default for the signal."""
    if timeout is not None:
        return timeout
    return INTERRUPT_SECONDS if number is signal.SIGINT else SHUTDOWN_SECONDS


class NextStep:
    """A timer for the next step of ending processes; one step is planned at a time."""

    def __init__(self) -> None:
        self.due: float | None = None
        self._step: Callable[[], None] | None = None

    def schedule(self, seconds: float, step: Callable[[], None]) -> None:
        """Plan a step in so many seconds; it replaces the planned one."""
        self.due, self._step = time.monotonic() + seconds, step

    def is_planned(self, step: Callable[[], None]) -> bool:
        """Return whether this is the step that was planned."""
        return self._step == step

    def cancel(self) -> None:
        """Plan nothing. Idempotent."""
        self.due = self._step = None

    def take_due(self) -> None:
        """Take the step if its time has come."""
        step = self._step
        if step is not None and self.due is not None and time.monotonic() >= self.due:
            self.cancel()
            step()
