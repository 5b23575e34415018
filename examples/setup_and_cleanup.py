"""Setup and cleanup as functions, and the questions a library asks before it uses a group.

python -m procgroup run --nproc-per-node 2 examples/setup_and_cleanup.py
python -m procgroup run --nproc-per-node 2 examples/setup_and_cleanup.py torch

The arrays are NumPy's, or of the library that is named at the end.
"""

import importlib
import sys

import procgroup as dist

library = importlib.import_module(sys.argv[1] if len(sys.argv) > 1 else "numpy")


def setup() -> None:
    assert dist.is_available() and not dist.is_initialized()
    dist.init_process_group("gloo")


def cleanup() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    try:
        setup()
        launched = "by the launcher" if dist.is_torchelastic_launched() else "by hand"
        print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}, started {launched}")
        dist.all_reduce(library.ones(4))
        dist.barrier()
    finally:
        cleanup()
    assert not dist.is_initialized()


if __name__ == "__main__":
    main()
