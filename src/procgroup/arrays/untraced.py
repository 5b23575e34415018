"""Exclude functions from torch.compile: communication with other ranks is not part of a graph.

torch's C++ code calls methods of the plug-in and hooks of DistributedDataParallel also while compiled code runs. Dynamo
then takes their frames for code that it should compile, and fails at the process group in them.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any, TypeVar

Member = TypeVar("Member")


def untraced(member: Member) -> Member:
    """Let torch.compile run a function or a class's methods, and all that they call, as Python does: a decorator."""
    # Loaded with torch; torch._dynamo takes half a second to import.
    dynamo = sys.modules["torch"]._C._dynamo.eval_frame
    if not hasattr(dynamo, "set_code_exec_strategy"):
        return member  # another torch: all works but compiled programs
    skip = dynamo._FrameAction.SKIP
    for each in [member] if isinstance(member, FunctionType) else vars(member).values():
        if isinstance(each, FunctionType):
            dynamo.set_code_exec_strategy(each.__code__, dynamo._FrameExecStrategy(skip, skip))
    if isinstance(member, FunctionType):
        marked: Any = member
        marked._torchdynamo_disable = True  # as torch.compiler.disable does: callers do not take it into their graph
        marked._torchdynamo_disable_msg = "it communicates with other ranks"
    return member
