"""Whether JAX is tracing a function, and what is done then: ``traced`` does it, which alone imports JAX."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from procgroup.functional.operations import FunctionalOperation
from procgroup.groups.group import ProcessGroup


def is_active() -> bool:
    """Return whether JAX traces this call: for jit, grad, vmap, scan or another of its transformations."""
    if "jax" not in sys.modules:
        return False
    traced = _traced()
    return traced is not None and bool(traced.is_tracing())


def perform(tree: Any, operation: FunctionalOperation, group: ProcessGroup) -> Any:
    """Make an operation part of what JAX traces; return the tree of its results."""
    return _traced().perform(tree, operation, group)


def barrier(group: ProcessGroup) -> None:
    """Make a barrier part of what JAX traces."""
    _traced().barrier(group)


@contextmanager
def jit_errors() -> Iterator[None]:
    """Raise the error of a collective inside of jax.jit as it is, where JAX raises a JaxRuntimeError that quotes it.

    A context manager, and a decorator. What is raised has JAX's error as its ``__cause__``: a DistError, or the
    KeyboardInterrupt of a Ctrl-C. Every other error is left alone. JAX raises where results are awaited: await them
    inside, as ``jax.block_until_ready`` does.
    """
    try:
        yield
    except RuntimeError as error:
        traced = _traced() if "jax" in sys.modules else None
        own = None if traced is None else traced.quoted_in(error)
        if own is None:
            raise
        raise own from error


@functools.cache
def _traced() -> Any:
    """Return the module that knows JAX; None for a JAX without what it needs."""
    try:
        from procgroup.functional import traced
    except ImportError:
        return None
    return traced
