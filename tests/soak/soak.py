"""Play scenarios with random faults, several at a time, and say what was wrong in them.

::

    python tests/soak/soak.py --count 10000 --first-seed 0 --jobs 4
    python tests/soak/soak.py --first-seed 4711 --show       # one again, with all that its ranks saw and printed
    python tests/soak/soak.py --count 200 --faults kill,term --moments calls

In the background of a shell that may end, start it with setsid: when a group of processes loses its shell, the kernel
continues those that are stopped, and a scenario with such a victim then counts as a hang.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # in its own folder this file is "soak", not the package

import two_hosts
from forked_ranks import adopt_orphans, die_with_parent
from soak.plan import FAULTS_AT, Plan
from soak.player import Watch, start
from soak.program import play
from soak.verdict import Judge
from two_hosts import Host

TRIES = 3
"""A scenario in which something came late is played again, up to twice, because the machine may be to blame."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1, help="how many scenarios to play (default: 1)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED", help="the seed of the first (default: 0)")
    faults = sorted({fault for faults in FAULTS_AT.values() for fault in faults})
    for name, all_of_it in (("faults", faults), ("moments", list(FAULTS_AT))):
        parser.add_argument(
            f"--{name}",
            type=lambda text: text.split(","),
            default=all_of_it,
            metavar=f"{name[:-1].upper()},...",
            help=f"play only scenarios with these: {', '.join(all_of_it)}",
        )
    parser.add_argument("--jobs", type=int, default=4, help="how many to play at a time (default: 4)")
    parser.add_argument("--show", action="store_true", help="print of each scenario all that was seen")
    arguments = parser.parse_args()
    jobs = min(arguments.jobs, arguments.count)
    if not any(set(FAULTS_AT.get(moment, ())) & {*arguments.faults} for moment in arguments.moments):
        parser.error("there is no such fault at such a moment")
    summary = Summary()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that no process and no host is left
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        workers = []
        for number in range(jobs):
            hosts = stack.enter_context(two_hosts.joined(number)) if not two_hosts.lacks() else ()
            task = {
                "first_seed": arguments.first_seed,
                "faults": arguments.faults,
                "moments": arguments.moments,
                "numbers": [number, arguments.count, jobs],
                "place": str(directory / str(number)),
                "hosts": [(host.namespace, host.address) for host in hosts],
                "show": arguments.show,
            }
            command = [sys.executable, str(Path(__file__).resolve()), json.dumps(task)]
            environment = {**os.environ, "PROCGROUP_RECORD_DIR": str(directory / f"records-{number}")}
            environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            workers.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)))
            stack.callback(workers[-1].kill)
        for result in results_of(workers):
            summary.add(result)
        crashed = [worker.returncode for worker in workers if worker.wait()]
    print(summary)
    if crashed:
        print(f"processes of the soak itself ended with {crashed}")
    return int(bool(crashed or summary.failed or summary.played < arguments.count))


def plans_of(first_seed: int, faults: Sequence[str], moments: Sequence[str]) -> Iterator[Plan]:
    """Return the plans of the seeds from the first on that have one of the faults, at one of the moments."""
    plans = map(Plan.of, itertools.count(first_seed))
    return (plan for plan in plans if plan.fault in faults and plan.moment in moments)


def results_of(workers: list[subprocess.Popen[bytes]]) -> Iterator[dict[str, Any]]:
    """Yield what the workers write, line by line, until all have ended."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ)
        unread = dict.fromkeys(selector.get_map(), b"")
        while selector.get_map():
            for key, _ in selector.select():
                if data := os.read(key.fd, 65536):
                    *lines, unread[key.fd] = (unread[key.fd] + data).split(b"\n")
                    yield from map(json.loads, lines)
                else:
                    selector.unregister(key.fd)


class Summary:
    """What has become of the scenarios so far; those with a defect are printed at once."""

    def __init__(self) -> None:
        self.played = 0
        self.failed: list[int] = []
        self.again = 0
        self.kinds: Counter[tuple[str, str]] = Counter()
        self.defects: Counter[tuple[str, str, str]] = Counter()
        self.worst: dict[tuple[str, str], tuple[float, int]] = {}
        self.started = time.monotonic()

    def add(self, result: dict[str, Any]) -> None:
        self.played += 1
        kind, seed = (result["fault"], result["moment"]), result["seed"]
        self.kinds[kind] += 1
        self.again += result["tries"] - 1
        if result["seconds"] is not None:
            self.worst[kind] = max(self.worst.get(kind, (0.0, seed)), (result["seconds"], seed))
        for defect in {defect["kind"] for defect in result["defects"]}:
            self.defects[(*kind, defect)] += 1
        if result["defects"]:
            self.failed.append(seed)
            print(result["plan"])
            for defect in result["defects"]:
                print(f"    {defect['kind']}: {defect['text']}")
            print(f"    again: python tests/soak/soak.py --first-seed {seed} --show", flush=True)
        if self.played % 100 == 0:
            took = time.monotonic() - self.started
            print(f"{self.played} played after {took:.0f} s, {len(self.failed)} with defects", flush=True)
        if result["shown"]:
            print(result["shown"], flush=True)

    def __str__(self) -> str:
        took = time.monotonic() - self.started
        lines = [f"{self.played} scenarios in {took:.0f} s, {len(self.failed)} with defects, {self.again} played again"]
        for (fault, moment), count in sorted(self.kinds.items()):
            seconds, seed = self.worst.get((fault, moment), (0.0, 0))
            worst = f", last error after at most {seconds:.2f} s (seed {seed})" if seconds else ""
            found = {kind: number for (*which, kind), number in self.defects.items() if which == [fault, moment]}
            wrong = f": {found}" if found else ""
            lines.append(f"    {fault:>9} at {moment:<8} {count:5}{worst}{wrong}")
        if self.failed:
            lines.append(f"seeds with defects: {self.failed}")
        return "\n".join(lines)


def work(task: dict[str, Any]) -> tuple[Plan, int, int]:
    """Play the scenarios of one worker. Returns only in a rank, with its plan, its number and its pipe."""
    modules = ("procgroup", "procgroup.backends.peer_network", "procgroup.backends.native", "procgroup.testing")
    for name in ("numpy", *modules):
        importlib.import_module(name)
    for name in importlib.import_module("procgroup").__all__:
        getattr(importlib.import_module("procgroup"), name)
    gc.freeze()  # otherwise each rank copies all of the memory at its end
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    die_with_parent()
    adopt_orphans()
    place, hosts = Path(task["place"]), [Host(*host) for host in task["hosts"]]
    plans = plans_of(task["first_seed"], task["faults"], task["moments"])
    for plan in itertools.islice(plans, *task["numbers"]):
        if plan.layout == "hosts" and not hosts:
            plan = plan.on_one_host()
        tries, defects = 0, []
        while tries == 0 or (tries < TRIES and defects and all(defect.may_be_the_machines for defect in defects)):
            tries += 1
            started = start(plan, place, hosts)
            if isinstance(started, tuple):
                return plan, *started
            scene = Watch(plan, place, hosts, started).watch()
            judge = Judge(plan, scene)
            defects = judge.defects()
        result = {
            "seed": plan.seed,
            "plan": str(plan),
            "fault": plan.fault,
            "moment": plan.moment,
            "tries": tries,
            "seconds": judge.seconds(),
            "defects": [{"kind": defect.kind, "text": defect.text} for defect in defects],
            "shown": shown(plan, judge) if task["show"] else "",
        }
        print(json.dumps(result), flush=True)
    shutil.rmtree(place, ignore_errors=True)
    sys.exit(0)


def shown(plan: Plan, judge: Judge) -> str:
    """Return all that was seen of a scenario as text."""
    scene = judge.scene
    zero = min(event["moment"] for seen in scene.ranks for event in seen.events)
    lines = [
        str(plan),
        f"fault at {(judge.fault or zero) - zero:.3f} s, resumed {scene.resumed}, watcher late {scene.delay:.3f} s",
    ]
    for seen in scene.ranks:
        lines.append(f"rank {seen.rank}: status {seen.status}, ended at {seen.ended - zero:.3f} s")
        for event in seen.events:
            more = {key: value for key, value in event.items() if key not in ("what", "moment")}
            lines.append(f"    {event['moment'] - zero:7.3f} {event['what']} {more}")
        lines.append(seen.output)
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        play(*work(json.loads(sys.argv[1])))
    else:
        sys.exit(main())
