"""Describe errors of a too low limit on open files."""

from __future__ import annotations

import errno
import resource


def describe(error: OSError) -> str:
    """Return the text of an error; for too many open files, the limit and how to raise it."""
    if error.errno != errno.EMFILE:
        return str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may have no more than {limit} open files; raise the limit with: ulimit -n"
