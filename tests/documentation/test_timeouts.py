"""The table of default timeouts says what the code does, and no timeout of the code is left out of it."""

from __future__ import annotations

import importlib
import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import procgroup as dist
from procgroup.launch import flags
from procgroup.launch.nodes.leases import Lease
from procgroup.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "watching.md"
UNITS = {"s": 1, "min": 60, "h": 3600}


def native(file: str, pattern: str) -> float:
    """Return the number that a pattern finds in a native source."""
    (found,) = re.findall(pattern, (ROOT / "native" / file).read_text())
    return float(found.replace("'", ""))


def constant(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"procgroup.{module}"), attribute)


def default(function: Any, parameter: str) -> Any:
    return inspect.signature(function).parameters[parameter].default


IN_THE_TABLE = {
    "finding the other ranks in `init_process_group`": "types.DEFAULT_TIMEOUT",
    "connecting the ranks of a new group": "backends.native._CONNECT_SECONDS",
    "a call on a group, and the wait for it": "types.DEFAULT_TIMEOUT",
    "waits on a store": "types.DEFAULT_STORE_TIMEOUT",
    "a report of the ranks that have not come yet": "rendezvous.join.REPORT_SECONDS",
    "leaving a group: calls that were issued": "groups.engine.FLUSH_SECONDS",
    "leaving a group: callbacks": "backends.native._CALLBACK_SECONDS",
    "the end of a process that hosts the store: its clients": "stores.tcp.LINGER_SECONDS",
    "the end of a process that hosts the store, after a start": "process.process_end.LATE_SECONDS",
    "all waits at the end of a process together, when a group": "process.process_end.FAILED_SECONDS",
    "a wait at the end of a process, before a line": "process.process_end.SILENT_SECONDS",
    "launcher, after a rank failed": "launch.deadlines.REPORT_SECONDS",
    "launcher, nodes that are to come together: static": "launch.deadlines.STATIC_TIMEOUT_SECONDS",
    "launcher, nodes that are to come together: elastic": "launch.deadlines.JOIN_TIMEOUT_SECONDS",
    "launcher, further nodes": "launch.deadlines.LAST_CALL_SECONDS",
    "launcher, between SIGTERM and SIGKILL": "launch.deadlines.SHUTDOWN_SECONDS",
    "launcher, between Ctrl-C and SIGKILL": "launch.deadlines.INTERRUPT_SECONDS",
    "`spawn`, between SIGTERM and SIGKILL": "launch.deadlines.SHUTDOWN_SECONDS",
    "launcher over ssh, the meeting of its agents": "launch.deadlines.HOSTS_JOIN_SECONDS",
    "an answer of an etcd or Redis server": "stores.database.ANSWER_SECONDS",
    "`procgroup submit ray`: free resources in the cluster": "launch.deadlines.RAY_START_SECONDS",
    "`procgroup doctor`: the ranks of a job": "diagnostics.doctor.command.JOIN_SECONDS",
    "`procgroup doctor`: a step of another host": "diagnostics.doctor.job.ANSWER_SECONDS",
    "`procgroup doctor`: a message": "diagnostics.doctor.links.MESSAGE_SECONDS",
    "`procgroup submit`: the scheduler's client": "launch.deadlines.SUBMIT_SECONDS",
}
ELSEWHERE = {
    "a deadlock, before it is reported": lambda: native("liveness/deadlock.hpp", r"kSuspiciousNs = ([\d']+);") / 1e9,
    "written data that another host": lambda: native("transport/channel.hpp", r"user_timeout_s = (\d+)\)"),
    "silence of another host": lambda: native("transport/tcp_channel.cpp", r"kProbeSeconds = (\d+);"),
    "`breakpoint()`": lambda: default(dist.breakpoint, "timeout_s"),
    "`run_ranks`": lambda: default(run_ranks, "timeout"),
    "launcher over ssh, every host connected": lambda: flags.parse("run", ["-n1", "-"]).ssh_timeout,
    "launcher, silence of another node": lambda: Lease().seconds,
}
NO_DEADLINES_OF_USERS = {
    "diagnostics.recorded_job.findings._USUAL_SECONDS": "how long every rank waits a little",
    "diagnostics.top.watch._USUAL_SECONDS": "how long every rank waits a little",
    "diagnostics.top.command._PLAIN_SECONDS": "how often the tables are printed",
    "diagnostics.metrics.collector.KEPT_SECONDS": "how long the end of a job can be read",
    "diagnostics.top.server._HEAD_SECONDS": "a browser's request, which is sent at once",
    "diagnostics.top.server._ANSWER_SECONDS": "a browser that does not read",
    "diagnostics.recorded_job.reading._SILENT_SECONDS": "how soon a rank is said to be lost",
    "api.exit_hooks._FAILED_SECONDS": "calls that were issued, when an exception ends the group",
    "torch_plugin.rendezvous_patch._CONNECT_SECONDS": "one attempt of many",
    "rendezvous.join._CONNECT_SECONDS": "part of the timeout of the start",
    "stores.tcp._CONNECT_AGAIN_SECONDS": "one attempt of many",
    "api.moved_store._ATTEMPT_SECONDS": "one attempt of many",
    "backends.nccl._LOSS_SECONDS": "the rank that hosted the store is found to be lost",
    "process.process_end._THREAD_SECONDS": "whether a thread's exception ended the program",
    "process.process_end._PAUSE_SECONDS": "whether a wait follows the one before",
    "cluster.pmi._ANSWER_SECONDS": "an mpiexec that hangs",
    "cluster.pmix._LONGEST_WAIT_SECONDS": "bounds what poll() is given",
    "cluster.pmi._LONGEST_POLL_SECONDS": "one wait of many",
    "groups.issue._IDLE_SECONDS": "a thread without work ends",
    "groups.issue._GRACE_SECONDS": "a thread's end is awaited",
    "diagnostics.doctor.interfaces._SECONDS": "the system lists its addresses",
    "diagnostics.doctor.job._PROBE_SECONDS": "one address is tried",
    "diagnostics.doctor.network._CONNECT_SECONDS": "one address is tried",
    "diagnostics.doctor.network._RESOLVE_SECONDS": "one name is looked up",
    "diagnostics.doctor.shared_libraries._SECONDS": "a library that hangs",
    "diagnostics.doctor.shared_libraries._DRIVER_SECONDS": "a driver that hangs",
    "diagnostics.doctor.single_copy._SECONDS": "a process that hangs",
    "launch.deadlines.RECOVERY_SECONDS": "further nodes, after the store was lost",
    "launch.deadlines.SETTLE_SECONDS": "other agents learn that this one leaves",
    "launch.deadlines.WAIT_REPORT_SECONDS": "how soon a line is printed",
    "backends.mpi._REPORT_SECONDS": "how soon a line is printed",
    "launch.deadlines.WAIT_REPEAT_SECONDS": "how often a line is repeated",
    "launch.flags.MOST_SECONDS": "bounds what a flag may say",
    "launch.deadlines.FLUSH_SECONDS": "output that nobody reads",
    "launch.output.sinks._LONGEST_POLL_SECONDS": "one wait of many",
    "launch.deadlines.ENDPOINT_REPORT_SECONDS": "how soon a line is printed",
    "launch.deadlines.TAKEOVER_SECONDS": "the next endpoint is tried",
    "launch.deadlines.FOREIGN_SECONDS": "how soon an error is certain",
    "launch.deadlines.HANDSHAKE_SECONDS": "one attempt of many",
    "launch.deadlines.RESOLVE_SECONDS": "one name is looked up",
    "launch.deadlines.HANG_LOOK_SECONDS": "how often ranks are looked at",
    "launch.deadlines.HANG_REPORT_SECONDS": "how soon a line is printed",
    "launch.deadlines.LOOK_ELSEWHERE_SECONDS": "how often other endpoints are looked at",
    "launch.deadlines.SERVER_CONNECT_SECONDS": "one attempt of many",
    "stores.database.WATCH_SECONDS": "how often a watch is renewed",
    "launch.deadlines.MARGIN_SECONDS": "as the agents' own time-outs, and a little more",
    "launch.deadlines.SSH_ALIVE_SECONDS": "ssh's own, when its configuration says nothing",
    "launch.deadlines.SSH_CONNECT_SECONDS": "ssh's own, when its configuration says nothing",
    "launch.deadlines.SSH_QUERY_SECONDS": "ssh reads its configuration",
    "launch.deadlines.KEEP_ALIVE_SECONDS": "a part of the lease",
    "launch.deadlines.MEETING_CLOSE_SECONDS": "threads that end",
    "launch.deadlines.ELSEWHERE_SECONDS": "one look of many",
    "launch.deadlines.AGENTS_LINGER_SECONDS": "the other agents read how the job ended",
    "launch.deadlines.RAY_PLACE_SECONDS": "actors that run say where",
    "launch.deadlines.STATUS_DELAY_SECONDS": "how soon a line is printed",
    "launch.deadlines.CAUSE_SECONDS": "which failure came first",
    "launch.deadlines.UNKILLABLE_SECONDS": "after SIGKILL",
    "stores.addresses._RESOLVE_SECONDS": "one attempt of many",
    "rendezvous.agent_store.STALE_SECONDS": "an address is read again",
    "rendezvous.agent_store._LONGEST_WAIT_SECONDS": "bounds what torch is given",
    "rendezvous.announced_store._ATTEMPT_SECONDS": "one attempt of many",
    "rendezvous.announced_store._RESOLVE_SECONDS": "one name is looked up",
    "rendezvous.hosting._HOST_SECONDS": "a record that is there is read",
    "rendezvous.hosting._REPEAT_SECONDS": "how often a line is repeated",
    "rendezvous.join._READ_SECONDS": "a verdict that is there is read",
    "stores.file._OPEN_SECONDS": "a file system that is slow to show a file",
    "stores.file._OTHER_JOB_SECONDS": "a file of another job, which may be about to go away",
    "stores.tcp._WITHDRAW_SECONDS": "an answer that changes nothing for the caller",
    "testing.ranks._END_SECONDS": "threads that end",
    "torch_plugin.callbacks._IDLE_SECONDS": "a thread without work ends",
    "torch_plugin.callbacks._END_SECONDS": "callbacks that run at the process's end",
}


def rows() -> dict[str, str]:
    """Return the table's rows: the wait, and its default."""
    table = PAGE.read_text().partition("## Default timeouts")[2]
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    return {wait.strip(): value.strip() for wait, value, _ in cells}


def in_seconds(text: str) -> float:
    """Read "30 min, ..." or "every 5 s"."""
    number, unit = re.search(r"(\d+) (s|min|h)\b", text).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


@pytest.mark.parametrize("row", [*IN_THE_TABLE, *ELSEWHERE])
def test_the_table_says_what_the_code_does(row: str) -> None:
    (documented,) = (value for wait, value in rows().items() if wait.startswith(row))
    value = ELSEWHERE[row]() if row in ELSEWHERE else constant(IN_THE_TABLE[row])
    assert in_seconds(documented) == (value.total_seconds() if isinstance(value, timedelta) else value)


def test_every_row_is_checked() -> None:
    checked = [*IN_THE_TABLE, *ELSEWHERE]
    assert [wait for wait in rows() if not any(wait.startswith(row) for row in checked)] == []


def test_every_timeout_of_the_code_is_in_the_table_or_is_none_of_a_user() -> None:
    source = ROOT / "src" / "procgroup"
    found = {
        ".".join([*file.relative_to(source).with_suffix("").parts, name])
        for file in source.rglob("*.py")
        for name, value in re.findall(r"^(\w*SECONDS|\w*TIMEOUT) = ([\d.]+)", file.read_text(), re.MULTILINE)
        if float(value) >= 1
    }
    assert found - {*IN_THE_TABLE.values(), *NO_DEADLINES_OF_USERS} == set()
    assert NO_DEADLINES_OF_USERS.keys() - found == set()


def test_the_public_default_is_the_table_s() -> None:
    assert dist.default_pg_timeout == constant("types.DEFAULT_TIMEOUT")
