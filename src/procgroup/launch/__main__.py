"""The old launcher's contract, ``python -m procgroup.launch``: each rank gets ``--local-rank=N`` as its first argument.

With ``--use-env`` it does not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from procgroup.launch.entry_point import run_command


def main(arguments: Sequence[str], program: str = "procgroup launch") -> int:
    """Run the command line ``arguments``; return the exit status."""
    from procgroup.launch import flags, run  # Ctrl-C may come while they are imported

    options = flags.parse(program, arguments, old_contract=True)
    local_rank = "0" if options.virtual_local_rank else "${local_rank}"
    first = [] if options.use_env else [f"--local-rank={local_rank}"]
    return run.launch(options, [*first, *options.script_arguments])


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:], "python -m procgroup.launch")))
