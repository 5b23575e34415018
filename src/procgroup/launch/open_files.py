"""Advice where the limit on open files is too low for a job."""

from __future__ import annotations

import errno
import resource


def describe(error: OSError) -> str:
    """Return the text of an error; where this process has too many files open, its limit and how to raise it."""
    if error.errno != errno.EMFILE:
        return str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may have no more than {limit} open files; raise the limit with: ulimit -n"
