"""``python -m procgroup.launch``: the old launcher's contract."""

import sys

from procgroup.launch.entry_point import run_command


def _launch() -> int:
    from procgroup.launch.launch import main  # Ctrl-C may come while it is imported

    return main(sys.argv[1:], "python -m procgroup.launch")


if __name__ == "__main__":
    sys.exit(run_command(_launch))
