"""How long the launcher and ``spawn`` wait for the ends of the processes that they started."""

from __future__ import annotations

INTERRUPT_SECONDS = 2.0
"""From Ctrl-C to SIGKILL, when no shutdown timeout was asked for."""

SHUTDOWN_SECONDS = 30.0
"""From SIGTERM to SIGKILL, when no shutdown timeout was asked for."""

UNKILLABLE_SECONDS = 30.0
"""From SIGKILL on; a process that hangs in the kernel is left after that."""

CAUSE_SECONDS = 1.5
"""From the first failure on, while all failures that are known blame a rank whose own failure is not known yet."""
