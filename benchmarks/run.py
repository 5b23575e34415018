"""Run procgroup beside Gloo, MPICH, Open MPI and the hardware's limit: ``procgroup bench`` with peers of their own.

Takes the arguments of ``procgroup bench``. Each peer has a virtual environment of its own under build/peers/.
"""

from __future__ import annotations

import sys

from peer_commands import DEFAULT_PEERS, PEERS

from procgroup.diagnostics.bench.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PEERS, DEFAULT_PEERS))
