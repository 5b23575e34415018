"""The old launcher's contract: each rank gets ``--local-rank=N`` as its first argument, unless ``--use-env``."""

from __future__ import annotations

from collections.abc import Sequence

from procgroup.launch import flags, run


def main(arguments: Sequence[str], program: str = "procgroup launch") -> int:
    """Run the command line ``arguments``; return the exit status."""
    options = flags.parse(program, arguments, old_contract=True)
    local_rank = "0" if options.virtual_local_rank else "${local_rank}"
    first = [] if options.use_env else [f"--local-rank={local_rank}"]
    return run.launch(options, [*first, *options.script_arguments])
