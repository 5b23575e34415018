"""How long calls may take, in seconds or as a timedelta, and options as a dict.

python -m procgroup run --nproc-per-node 2 examples/timeouts_and_options.py
python -m procgroup run --nproc-per-node 2 examples/timeouts_and_options.py torch

The arrays are NumPy's, or of the library that is named at the end.
"""

import importlib
import sys
import time
from datetime import timedelta

import procgroup as dist

library = importlib.import_module(sys.argv[1] if len(sys.argv) > 1 else "numpy")

dist.init_process_group("gloo", timeout=timedelta(minutes=10), group_name="trainers")
dist.barrier()
dist.destroy_process_group()

dist.init_process_group("gloo", pg_options={"timeout": 1, "init_method_timeout": 30})
if dist.get_rank() == 0:
    started = time.monotonic()
    try:
        dist.recv(library.zeros(1), src=1)  # which rank 1 never sends
    except dist.DistBackendError as error:
        print(f"after {time.monotonic() - started:.1f} s: {type(error).__name__}: {error}")
else:
    time.sleep(4)
dist.destroy_process_group()
