"""What the server that ranks of PyTorch programs are forked from has imported beside `preloaded`."""

from __future__ import annotations

import atexit
import gc
from importlib import import_module

_TORCH = ("torch", "torch.distributed._functional_collectives", "torch.nn.parallel")
_FOR_OPTIMIZERS = "torch._dynamo"  # torch imports it when the first optimizer is made, which takes a second
for _name in (*_TORCH, _FOR_OPTIMIZERS, "procgroup.torch_plugin"):
    import_module(_name)

atexit._clear()
gc.freeze()
