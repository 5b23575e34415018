"""The flags of ``procgroup run``: torchrun's names, in both spellings, and procgroup's own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from procgroup.cluster.hosts import parse_hosts, read_hostfile
from procgroup.environ import TORCH_ELASTIC_SHUTDOWN_TIMEOUT, Variable, launcher_flag
from procgroup.launch import flag_values
from procgroup.launch.output.log_options import chosen_ranks, collapse, filters, prefix, streams


class Flag(NamedTuple):
    """One flag: the function that reads its text, its default as text, and its help.

    ``read`` also gets the values of the earlier flags ``needs``. ``metavar`` is "" for a flag without a value.
    ``words`` are the values that shells complete. ``variable`` is another variable of torchrun that sets the default.
    """

    name: str
    metavar: str
    read: Callable[..., Any]
    default: str
    text: str
    short: Sequence[str] = ()
    words: Sequence[str] = ()
    needs: Sequence[str] = ()
    variable: Variable[str] | None = None

    @property
    def destination(self) -> str:
        """The flag's name among the parsed options."""
        return self.name.lstrip("-").replace("-", "_")

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flag to a parser, in both spellings and in short ones."""
        spellings = dict.fromkeys([*self.short, self.name, f"--{self.destination}"])
        value: dict[str, Any] = {"metavar": self.metavar} if self.metavar else {"action": "store_const", "const": "1"}
        shown = f"{self.text} (default: {self.default})" if self.metavar and self.default else self.text
        parser.add_argument(*spellings, dest=self.destination, default=None, help=shown, **value)

    def find(self, given: str | None, *, reads_variables: bool = True) -> tuple[str, str]:
        """Return the flag's text and its source, given the text on the command line (None: not given)."""
        if given is not None:
            return given, self.name
        for variable in (*(launcher_flag(self.name) if reads_variables else ()), self.variable):
            if variable is not None and variable.is_set():
                return variable.get(), variable.name
        return self.default, "default"


def add_flags(parser: argparse.ArgumentParser, *, old_contract: bool) -> list[Flag]:
    """Add all flags to a parser and return them in the order of the help; ``old_contract`` adds ``--use-env``."""
    flags = [*_FLAGS, _USE_ENV] if old_contract else list(_FLAGS)
    for flag in flags:
        flag.add_to(parser)
    return flags


def _switch(name: str, text: str, short: Sequence[str] = ()) -> Flag:
    """Return a flag without a value."""
    return Flag(name, "", flag_values.truth, "0", text, short)


def _choice(name: str, metavar: str, words: Sequence[str], default: str, text: str, short: Sequence[str] = ()) -> Flag:
    """Return a flag whose value is one of ``words``, or the default."""
    return Flag(name, metavar, partial(flag_values.one_of, words, default), default, text, short, words)


_STREAMS = "0 none, 1 stdout, 2 stderr, 3 both; by local rank: 0:1,10:3"
_FILTERED = "keep lines of {0} with one of these words, separated by commas, in filtered_{0}.log too"

_FLAGS = (
    # The size of the job, and where it meets on one host.
    Flag("--gpus", "LIST", flag_values.gpus, "", "GPUs of this host that the ranks may use, such as 0,2-3"),
    Flag(
        "--nproc-per-node",
        "N",
        flag_values.process_count,
        "1",
        "ranks to start on this node: a number, cpu, gpu, or auto",
        short=("-n", "-np"),
        words=("auto", "cpu", "gpu"),
        needs=("gpus",),
    ),
    Flag("--nnodes", "N", flag_values.node_range, "1:1", "nodes of the job: N, or MIN:MAX"),
    Flag("--node-rank", "N", flag_values.count, "0", "this node's number, with addresses given by hand"),
    Flag("--max-restarts", "N", flag_values.count, "0", "how often the job may start its ranks again"),
    _switch("--replace", "start only a failed rank again, while the others go on; --max-restarts says how often"),
    _switch(
        "--keep-going", "let the others go on when a rank fails; the job succeeds when one of them does (one node)"
    ),
    _switch("--standalone", "one node, nothing to configure; this is the default"),
    Flag("--master-addr", "HOST", flag_values.host, "127.0.0.1", "MASTER_ADDR of the ranks: the first node"),
    Flag("--master-port", "PORT", flag_values.port, "", "MASTER_PORT: where the nodes meet; on one node any free one"),
    # Hosts that this command starts the ranks on.
    Flag("--hosts", "LIST", parse_hosts, "", "start the ranks on these hosts over ssh: a:4,b:4; see --hostfile"),
    Flag("--hostfile", "PATH", read_hostfile, "", "the same from a file, a line each: host slots=4"),
    Flag("--ssh", "COMMAND", str, "ssh", "with --hosts: OpenSSH's client and its options"),
    Flag("--ssh-timeout", "SECONDS", flag_values.seconds, "60", "with --hosts: until when each host must be ready"),
    Flag("--chdir", "PATH", str, "", "with --hosts: working directory there, by default this one"),
    Flag("--export", "NAME,NAME=VALUE", str, "", "with --hosts: further variables for the ranks there"),
    Flag("--remote-python", "PATH", str, "", "with --hosts: interpreter there, by default this one"),
    # How several nodes meet.
    Flag(
        "--rdzv-backend",
        "NAME",
        flag_values.rendezvous_backend,
        "static",
        "how the nodes meet: static, c10d, file, etcd or redis",
        words=flag_values.RENDEZVOUS_BACKENDS,
    ),
    Flag("--rdzv-endpoint", "PLACE", str, "", "where: host[:port] of a node or server, or several; a path; a URL"),
    Flag("--rdzv-id", "NAME", str, "", "the job's name, the same on every node; TORCHELASTIC_RUN_ID"),
    Flag("--rdzv-conf", "LIST", flag_values.rendezvous_conf, "", "further settings: key=value,key=value"),
    Flag(
        "--local-addr",
        "HOST",
        flag_values.optional_host,
        "",
        "this node's address for the others, where it is not found",
    ),
    _choice(
        "--on-partition",
        "WHAT",
        ("continue", "stop"),
        "",
        "what half of the nodes does when the other half is cut off: continue or stop",
    ),
    # The GPUs and CPUs of the ranks.
    _switch("--virtual-local-rank", "show each rank one GPU only, as device 0, and set LOCAL_RANK to 0"),
    _choice(
        "--numa-binding",
        "WHAT",
        flag_values.BINDINGS,
        "",
        f"CPUs of each rank: {', '.join(flag_values.BINDINGS)}; those of its GPU, where it is known",
        short=("--bind",),
    ),
    # Behaviour.
    Flag("--role", "NAME", str, "default", "ROLE_NAME of the ranks"),
    _switch("--replace-gloo", "let PyTorch programs that say gloo run on procgroup"),
    _switch("--replace-nccl", "let PyTorch programs that say nccl run on procgroup, which calls NCCL"),
    Flag(
        "--shutdown-timeout",
        "SECONDS",
        flag_values.optional_seconds,
        "",
        "seconds from SIGTERM to SIGKILL for the ranks; 30 by default, 2 after Ctrl-C",
        variable=TORCH_ELASTIC_SHUTDOWN_TIMEOUT,
    ),
    Flag(
        "--signals-to-handle",
        "NAMES",
        flag_values.signals,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "signals that end the ranks, separated by commas",
    ),
    Flag("--monitor-interval", "S", flag_values.optional_seconds, "", "has no effect: ranks are watched by events"),
    _choice("--start-method", "NAME", flag_values.START_METHODS, "spawn", "for functions, so without effect here"),
    _choice(
        "--event-log-handler",
        "NAME",
        ("null", "console"),
        "null",
        "null, or console: a line of JSON on stderr for each rank and the agent when the job has ended",
    ),
    Flag(
        "--hang-timeout",
        "SECONDS",
        flag_values.optional_seconds,
        "",
        "kill a rank that is stopped, stuck in the kernel, or has ceased to call procgroup.report for so long",
    ),
    _switch("--dry-run", "show what each rank would be started with, and where that comes from"),
    # Output.
    Flag("--log-dir", "PATH", str, "", "keep each rank's stdout.log and stderr.log below this folder"),
    _choice("--logs-specs", "NAME", ("default",), "default", "default, the only one"),
    Flag("--redirects", "STREAMS", streams, "0", f"keep in files and do not show: {_STREAMS}", ("-r",)),
    Flag("--tee", "STREAMS", streams, "0", f"keep in files and show: {_STREAMS}", ("-t",)),
    Flag("--show-ranks", "RANKS", chosen_ranks, "", "show these ranks only, such as 0,3-5; files have all"),
    Flag("--local-ranks-filter", "RANKS", chosen_ranks, "", "the same, by local rank"),
    Flag("--duplicate-stdout-filters", "WORDS", filters, "", _FILTERED.format("stdout")),
    Flag("--duplicate-stderr-filters", "WORDS", filters, "", _FILTERED.format("stderr")),
    Flag("--log-prefix", "TEMPLATE", prefix, "", "what stands before each line, such as '[r{rank} {host}]'"),
    Flag(
        "--collapse",
        "WHEN",
        collapse,
        "auto",
        "show equal lines of several ranks once: always, never, or auto, on a terminal from 9 ranks on",
    ),
    # The program.
    _switch("--module", "run a module, as python -m does", ("-m",)),
    _switch("--no-python", "run the program itself, without the Python interpreter"),
    _switch(
        "--run-path", "run a script, folder or zip file in the launcher's interpreter; wins over -m and --no-python"
    ),
)

_USE_ENV = _switch("--use-env", "leave out the --local-rank=N argument; LOCAL_RANK holds the same number")
