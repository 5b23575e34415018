"""A rank of ``elastic_launch``, which calls a pickled function: ``python -m procgroup.launch.function_worker FOLDER``.

The parent process made the folder, which only its user can read. It holds the function with its arguments; the rank
writes its result there, under its number.
"""

from __future__ import annotations

import multiprocessing.spawn
import pickle
import sys
from pathlib import Path

from procgroup.process.environ import RANK
from procgroup.process.error_file import record, traceback_of


def main(folder: Path) -> int:
    """Call the function; return the exit status of the rank."""
    preparation, content = pickle.loads((folder / "function").read_bytes())
    multiprocessing.spawn.prepare(preparation)
    function, arguments = pickle.loads(content)
    try:
        result = record(function)(*arguments)
    except Exception as error:
        sys.stderr.write(traceback_of(error))
        return 1
    _write(folder / f"result_{RANK.get()}", result)
    return 0


def _write(path: Path, result: object) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
