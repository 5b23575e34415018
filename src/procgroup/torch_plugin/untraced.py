"""What torch.compile is to leave as it is.

torch's C++ code calls methods of the plug-in also while compiled code runs, from stock DDP for one. Dynamo then takes
their frames for code that it should compile, and fails at the process group in them.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch


def untraced(kind: Any) -> Any:
    """Let torch.compile run a class's methods, and all that they call, as Python does. To decorate classes with."""
    dynamo = torch._C._dynamo.eval_frame  # loaded with torch; torch._dynamo takes half a second to import
    if not hasattr(dynamo, "set_code_exec_strategy"):
        return kind  # another torch: all works but compiled programs
    skip = dynamo._FrameAction.SKIP
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            dynamo.set_code_exec_strategy(member.__code__, dynamo._FrameExecStrategy(skip, skip))
    return kind
