"""``procgroup doctor`` where the GPUs are stand-ins, which it asks through CUDA's driver."""

from __future__ import annotations

import json
import sys

from nccl import stand_ins

from world import run_command


def findings(**environment: str) -> dict[str, list[str]]:
    """Return the texts of the section about GPUs by level."""
    done = run_command(
        [sys.executable, "-m", "procgroup", "doctor", "--json"],
        environment={**stand_ins.environment(gpus=3), **environment},
        timeout=60,
    )
    sections = json.loads(done.stdout)["hosts"][0]["sections"]
    found: dict[str, list[str]] = {"ok": [], "note": [], "warning": [], "problem": []}
    for one in next(section["findings"] for section in sections if section["name"] == "GPUs and NCCL"):
        found[one["level"]].append(one["text"])
    return found


def test_gpus_gates_peers_and_the_library_are_shown() -> None:
    found = findings(NCCL_SOCKET_IFNAME="lo")
    assert not found["problem"] and not found["warning"], found
    shown = "\n".join(found["ok"])
    for expected in ("CUDA 13.0: this process may use 3 GPUs", "behind gates", "reach each other's memory"):
        assert expected in shown, found
    assert f"NCCL 2.28.7 at {stand_ins.build()}" in shown and "NCCL uses lo" in shown


def test_what_the_gpus_lack_and_what_contradicts_is_named() -> None:
    lacks = {"PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS": "1", "PROCGROUP_STAND_IN_NO_PEER_ACCESS": "1"}
    found = findings(**lacks, NCCL_SOCKET_IFNAME="none", NCCL_P2P_DISABLE="1", LOCAL_WORLD_SIZE="4")
    notes = "\n".join(found["note"])
    assert "no stream memory operations on GPU 0, 1, 2" in notes and "0 and 1, 0 and 2, 1 and 2" in notes, found
    assert any("NCCL_SOCKET_IFNAME=none" in text for text in found["problem"]), found
    warnings = "\n".join(found["warning"])
    assert "NCCL_P2P_DISABLE=1" in warnings and "4 ranks" in warnings and "3 GPUs" in warnings, found
