"""How the tests start ``scripted_peer.py``."""

from __future__ import annotations

import sys
from pathlib import Path

from procgroup.diagnostics.bench.peer import PeerCommand

HERE = Path(__file__).resolve().parent


def scripted_command(name: str, ranks: int, behaviour: str) -> PeerCommand:
    arguments = [sys.executable, str(HERE / "scripted_peer.py"), "{socket}", str(ranks), behaviour]
    return PeerCommand(name, arguments, {})
