"""A rank that calls a function which its parent pickled: ``python -m procgroup.launch.function_worker FOLDER``.

The folder is the parent's and can be read by its user only. It holds the function with its arguments; the result is
left there under the rank's number.
"""

from __future__ import annotations

import multiprocessing.spawn
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from procgroup.environ import RANK
from procgroup.launch.failures.record import record


def main(folder: Path) -> int:
    """Call the function; return the exit status of the rank."""
    preparation, content = pickle.loads((folder / "function").read_bytes())
    multiprocessing.spawn.prepare(preparation)
    function, arguments = pickle.loads(content)
    try:
        result = record(function)(*arguments)
    except Exception as error:
        _show(error)
        return 1
    _leave(folder / f"result_{RANK.get()}", result)
    return 0


def _show(error: Exception) -> None:
    """Print the traceback without the frames of this file and of the decorator."""
    frames: Any = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, record.__code__.co_filename):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _leave(path: Path, result: object) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
