"""A driver for the tests to kill: starts two scripted peers and measures one that never answers."""

from __future__ import annotations

import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from scripted import scripted_command

from procgroup.diagnostics.bench.peer import BenchPeer, Plan


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as on_exit:
        directory = Path(on_exit.enter_context(tempfile.TemporaryDirectory()))
        peers = [
            on_exit.enter_context(BenchPeer(scripted_command(name, 2, behaviour), 2, directory))
            for name, behaviour in (("idle", "works"), ("busy", "stuck"))
        ]
        for peer in peers:
            peer.connect(timeout=30)
        print("ready", flush=True)
        peers[1].measure("all_reduce", 8, Plan(samples=100, calls=1), timeout=600)


if __name__ == "__main__":
    main()
