"""The flags of ``procgroup run``: torchrun's names, in both spellings, and procgroup's own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
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
    read: Callable[..., Any]
    default: str
    text: str
    metavar: str = ""
    short: Sequence[str] = ()
    words: Sequence[str] = ()
    needs: Sequence[str] = ()
    variable: Variable[str] | None = None

    @property
    def destination(self) -> str:
        """The flag's name among the parsed options."""
        return self.name.lstrip("-").replace("-", "_")

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
    flags = _Flags(parser)
    _add_size_flags(flags)
    _add_hosts_flags(flags)
    _add_rendezvous_flags(flags)
    _add_placement_flags(flags)
    _add_behaviour_flags(flags)
    _add_log_flags(flags)
    _add_program_flags(flags)
    if old_contract:
        flags.add_switch("--use-env", "leave out the --local-rank=N argument; LOCAL_RANK holds the same number")
    return flags.added


class _Flags:
    """Adds flags to a parser, and collects them."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.added: list[Flag] = []
        self._parser = parser

    def add(
        self,
        flag: str,
        read: Callable[..., Any],
        default: str,
        text: str,
        metavar: str,
        short: Sequence[str] = (),
        words: Sequence[str] = (),
        needs: Sequence[str] = (),
        variable: Variable[str] | None = None,
    ) -> None:
        """Add a flag with a value, in both spellings and in short ones."""
        added = Flag(flag, read, default, text, metavar, short, words, needs, variable)
        self.added.append(added)
        shown = text if not default else f"{text} (default: {default})"
        spellings = [*short, *_spellings(flag)]
        self._parser.add_argument(*spellings, dest=added.destination, default=None, metavar=metavar, help=shown)

    def add_switch(self, flag: str, text: str, short: Sequence[str] = ()) -> None:
        """Add a flag without a value."""
        self.added.append(Flag(flag, flag_values.truth, "0", text, short=short))
        self._parser.add_argument(*short, *_spellings(flag), action="store_const", const="1", default=None, help=text)


def _add_size_flags(flags: _Flags) -> None:
    flags.add("--gpus", flag_values.gpus, "", "GPUs of this host that the ranks may use, such as 0,2-3", "LIST")
    flags.add(
        "--nproc-per-node",
        flag_values.process_count,
        "1",
        "ranks to start on this node: a number, cpu, gpu, or auto",
        "N",
        short=("-n", "-np"),
        words=("auto", "cpu", "gpu"),
        needs=("gpus",),
    )
    flags.add("--nnodes", flag_values.node_range, "1:1", "nodes of the job: N, or MIN:MAX", "N")
    flags.add("--node-rank", flag_values.count, "0", "this node's number, with addresses given by hand", "N")
    flags.add("--max-restarts", flag_values.count, "0", "how often the job may start its ranks again", "N")
    flags.add_switch("--standalone", "one node, nothing to configure; this is the default")
    flags.add("--master-addr", flag_values.host, "127.0.0.1", "MASTER_ADDR of the ranks: the first node", "HOST")
    flags.add(
        "--master-port", flag_values.port, "", "MASTER_PORT: where the nodes meet; on one node any free one", "PORT"
    )


def _add_hosts_flags(flags: _Flags) -> None:
    flags.add("--hosts", parse_hosts, "", "start the ranks on these hosts over ssh: a:4,b:4; see --hostfile", "LIST")
    flags.add(
        "--hostfile",
        lambda path: read_hostfile(path) if path else [],
        "",
        "the same from a file, a line each: host slots=4",
        "PATH",
    )
    flags.add("--ssh", flag_values.text, "ssh", "with --hosts: OpenSSH's client and its options", "COMMAND")
    flags.add("--ssh-timeout", flag_values.seconds, "60", "with --hosts: until when each host must be ready", "SECONDS")
    flags.add("--chdir", flag_values.text, "", "with --hosts: working directory there, by default this one", "PATH")
    flags.add(
        "--export", flag_values.text, "", "with --hosts: further variables for the ranks there", "NAME,NAME=VALUE"
    )
    flags.add("--remote-python", flag_values.text, "", "with --hosts: interpreter there, by default this one", "PATH")


def _add_rendezvous_flags(flags: _Flags) -> None:
    flags.add(
        "--rdzv-backend",
        flag_values.rendezvous_backend,
        "static",
        "how the nodes meet: static, c10d, file, etcd or redis",
        "NAME",
        words=flag_values.RENDEZVOUS_BACKENDS,
    )
    flags.add(
        "--rdzv-endpoint",
        flag_values.text,
        "",
        "where: host[:port] of a node or server, or several; a path; a URL",
        "PLACE",
    )
    flags.add("--rdzv-id", flag_values.text, "", "the job's name, the same on every node; TORCHELASTIC_RUN_ID", "NAME")
    flags.add("--rdzv-conf", flag_values.rendezvous_conf, "", "further settings: key=value,key=value", "LIST")
    flags.add(
        "--local-addr",
        flag_values.optional_host,
        "",
        "this node's address for the others, where it is not found",
        "HOST",
    )
    flags.add(
        "--on-partition",
        flag_values.partition_policy,
        "",
        "what half of the nodes does when the other half is cut off: continue or stop",
        "WHAT",
        words=("continue", "stop"),
    )


def _add_placement_flags(flags: _Flags) -> None:
    flags.add_switch("--virtual-local-rank", "show each rank one GPU only, as device 0, and set LOCAL_RANK to 0")
    flags.add(
        "--numa-binding",
        flag_values.binding,
        "",
        f"CPUs of each rank: {', '.join(flag_values.BINDINGS)}; those of its GPU, where it is known",
        "WHAT",
        short=("--bind",),
        words=flag_values.BINDINGS,
    )


def _add_behaviour_flags(flags: _Flags) -> None:
    flags.add("--role", flag_values.text, "default", "ROLE_NAME of the ranks", "NAME")
    flags.add_switch("--replace-gloo", "let PyTorch programs that say gloo run on procgroup")
    flags.add(
        "--shutdown-timeout",
        flag_values.optional_seconds,
        "",
        "seconds from SIGTERM to SIGKILL for the ranks; 30 by default, 2 after Ctrl-C",
        "SECONDS",
        variable=TORCH_ELASTIC_SHUTDOWN_TIMEOUT,
    )
    flags.add(
        "--signals-to-handle",
        flag_values.signals,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "signals that end the ranks, separated by commas",
        "NAMES",
    )
    flags.add("--monitor-interval", flag_values.optional_seconds, "", "has no effect: ranks are watched by events", "S")
    flags.add("--start-method", flag_values.start_method, "spawn", "for functions, so without effect here", "NAME")
    how = "null, or console: a line of JSON on stderr for each rank and the agent when the job has ended"
    flags.add("--event-log-handler", flag_values.event_log_handler, "null", how, "NAME")
    flags.add(
        "--hang-timeout",
        flag_values.optional_seconds,
        "",
        "kill a rank that is stopped, stuck in the kernel, or has ceased to call procgroup.report for so long",
        "SECONDS",
    )
    flags.add_switch("--dry-run", "show what each rank would be started with, and where that comes from")


def _add_log_flags(flags: _Flags) -> None:
    what = "0 none, 1 stdout, 2 stderr, 3 both; by local rank: 0:1,10:3"
    flags.add("--log-dir", flag_values.text, "", "keep each rank's stdout.log and stderr.log below this folder", "PATH")
    flags.add("--logs-specs", flag_values.logs_specs, "default", "default, the only one", "NAME")
    flags.add("--redirects", streams, "0", f"keep in files and do not show: {what}", "STREAMS", short=("-r",))
    flags.add("--tee", streams, "0", f"keep in files and show: {what}", "STREAMS", short=("-t",))
    flags.add("--show-ranks", chosen_ranks, "", "show these ranks only, such as 0,3-5; files have all", "RANKS")
    flags.add("--local-ranks-filter", chosen_ranks, "", "the same, by local rank", "RANKS")
    for name in ("stdout", "stderr"):
        text = f"keep lines of {name} with one of these words, separated by commas, in filtered_{name}.log too"
        flags.add(f"--duplicate-{name}-filters", filters, "", text, "WORDS")
    flags.add("--log-prefix", prefix, "", "what stands before each line, such as '[r{rank} {host}]'", "TEMPLATE")
    when = "show equal lines of several ranks once: always, never, or auto, on a terminal from 9 ranks on"
    flags.add("--collapse", collapse, "auto", when, "WHEN")


def _add_program_flags(flags: _Flags) -> None:
    flags.add_switch("--module", "run a module, as python -m does", short=("-m",))
    flags.add_switch("--no-python", "run the program itself, without the Python interpreter")
    flags.add_switch(
        "--run-path", "run a script, folder or zip file in the launcher's interpreter; wins over -m and --no-python"
    )


def _spellings(flag: str) -> list[str]:
    underscored = "--" + flag[2:].replace("-", "_")
    return [flag] if not flag.startswith("--") or underscored == flag else [flag, underscored]
