"""What the server that ranks of PyTorch programs are forked from has imported beside `preloaded`."""

from __future__ import annotations

import atexit
from importlib import import_module

for _name in ("torch", "torch.distributed._functional_collectives", "torch.nn.parallel", "procgroup.torch_plugin"):
    import_module(_name)

atexit._clear()
