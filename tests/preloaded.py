"""What the server that ranks are forked from has imported before: all that most of them use.

A rank that imports it again takes 0.1 s of a core; there are thousands of ranks in a run of the tests.
"""

from __future__ import annotations

import atexit
import gc
from importlib import import_module

for _name in ("encodings.idna", "ml_dtypes", "numpy", "psutil", "pytest"):
    import_module(_name)

# What those want to be done at exit is not the ranks' business; what procgroup wants done is.
atexit._clear()

_package = import_module("procgroup")
for _name in ("backends.peer_network", "backends.native", "process.log_handler", "testing"):
    import_module(f"procgroup.{_name}")
for _name in _package.__all__:
    getattr(_package, _name)

gc.freeze()  # a collection in a rank would visit, and so copy, all of this: more work than the rest of a small rank
