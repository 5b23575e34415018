"""procgroup as a backend of stock ``torch.distributed``: ``init_process_group("procgroup")``.

::

    import torch                        torch calls the entry point: register()
    init_process_group("procgroup")     torch meets at its store, then calls creation.create(options)
    all_reduce(tensor)                  process_group.TorchProcessGroup.allreduce -> groups.ProcessGroup.all_reduce

Nothing of the engine is loaded before a group is made; in Gloo's place it is loaded at once, for all ranks that the
program forks. The files of this package, and no others of procgroup but those of DistributedDataParallel, import torch;
``register`` is called by torch itself and needs no import.
"""

from __future__ import annotations

import sys
import warnings
from functools import wraps
from typing import Any

NAME = "procgroup"

replaced: set[str] = set()
"""The names of torch's backends in whose place procgroup's groups are made."""


def register() -> None:
    """Make ``"procgroup"`` a backend of torch.distributed for CPU and CUDA tensors. Idempotent, never raises.

    With PROCGROUP_REPLACE_GLOO=1 a program that says "gloo" gets procgroup's transport under that name; with
    PROCGROUP_REPLACE_NCCL=1 one that says "nccl" gets NCCL by procgroup. torch calls this while it is imported, by the
    entry point ``torch.backends``: what goes wrong is a warning, and torch goes on.
    """
    try:
        _register()
    except Exception as error:
        warnings.warn(f"procgroup could not register with torch.distributed: {error!r}", RuntimeWarning, stacklevel=2)


def _register() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    from procgroup.process.environ import PROCGROUP_REPLACE_GLOO, PROCGROUP_REPLACE_NCCL

    _name_ranks(sys.modules.get("torch.distributed.rendezvous"))

    if PROCGROUP_REPLACE_GLOO.get():
        from procgroup.torch_plugin import gloo

        gloo.replace()
    if PROCGROUP_REPLACE_NCCL.get():
        from procgroup.torch_plugin import nccl

        nccl.replace()


def _name_ranks(rendezvous: Any) -> None:
    """Let the errors of torch's env:// and tcp:// name the missing ranks from now on. Idempotent."""
    make = getattr(rendezvous, "_create_c10d_store", None)
    if make is None or hasattr(make, "__wrapped__"):
        return

    @wraps(make)
    def create_store(*arguments: Any, **named: Any) -> Any:
        from procgroup.torch_plugin import rendezvous_patch

        return rendezvous_patch.create_store(make, *arguments, **named)

    rendezvous._create_c10d_store = create_store


def _create(options: Any, backend_options: Any = None) -> Any:
    from procgroup.torch_plugin.creation import create

    return create(options, backend_options, name=NAME)
