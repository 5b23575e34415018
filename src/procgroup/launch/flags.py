"""The flags of ``procgroup run``: torchrun's names, in both spellings, with defaults from the environment.

A flag wins over its variable PET_<FLAG> (torchrun's), that over PROCGROUP_<FLAG>, that over the default; where each
value came from is kept, for messages and for ``--dry-run``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from procgroup.cluster.hosts import parse_hosts, read_hostfile
from procgroup.environ import (
    PROCGROUP_JOB_KEY,
    PROCGROUP_TRANSPORT,
    PROCGROUP_WAIT_REPORT_SECONDS,
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT,
    Variable,
    launcher_flag,
)
from procgroup.launch import flag_values
from procgroup.launch.output.log_options import LogOptions, chosen_ranks, collapse, filters, prefix, streams

# They have no flags. Ranks would find an unusable value later, or only in some jobs.
_VARIABLES_OF_RANKS = (PROCGROUP_JOB_KEY, PROCGROUP_TRANSPORT, PROCGROUP_WAIT_REPORT_SECONDS)

_WITH_HOSTS = ("--ssh", "--ssh-timeout", "--chdir", "--export", "--remote-python")


class _RaisingParser(argparse.ArgumentParser):
    """A parser for callers in a program, which is not to end because of a value."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class Flag(NamedTuple):
    """One flag: how its text is read, what it is by default, as text, and how it is shown.

    ``read`` also takes the values of the flags ``needs``, which stand before this one. ``metavar`` is "" for a flag
    without a value; ``words`` are the values that shells offer. ``variable`` is another variable of torchrun's that
    sets the default.
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
        """Return the text that counts, and where it came from."""
        if given is not None:
            return given, self.name
        for variable in (*(launcher_flag(self.name) if reads_variables else ()), self.variable):
            if variable is not None and variable.is_set():
                return variable.get(), variable.name
        return self.default, "default"


def parse(
    program: str, arguments: Sequence[str], *, old_contract: bool = False, in_program: bool = False
) -> argparse.Namespace:
    """Parse the command line; ``old_contract`` adds ``--use-env``.

    ``texts`` and ``sources`` of the options say how each value was given, and where it came from. An unusable one ends
    the program with status 2 and the reason. With ``in_program``, for a caller that is no command, it raises
    ValueError, and the variables PET_<FLAG> and PROCGROUP_<FLAG> are not read.
    """
    parser, flags = _parser(program, old_contract, _RaisingParser if in_program else argparse.ArgumentParser)
    _check_variables(parser)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_unknown_flag(parser, unknown[0]))
    options.parser = parser
    options.texts, options.sources = {}, {}
    for flag in flags:
        text, source = flag.find(getattr(options, flag.destination), reads_variables=not in_program)
        options.texts[flag.destination], options.sources[flag.destination] = text, source
        setattr(options, flag.destination, _read(options, flag, text, source))
    if options.module and options.no_python and not options.run_path:
        parser.error("--module and --no-python exclude each other: without Python there are no modules")
    if old_contract and options.no_python and not options.use_env:
        parser.error("--no-python needs --use-env: a program that is not Python gets no --local-rank argument")
    given = [flag for flag in _WITH_HOSTS if options.sources[flag[2:].replace("-", "_")] == flag]
    if given and not (options.hosts or options.hostfile):
        parser.error(f"{given[0]} needs --hosts or --hostfile: without them nothing is started on another host")
    return options


def refuse(options: argparse.Namespace, text: str) -> NoReturn:
    """End as for an unusable flag, with this reason."""
    options.parser.error(text)
    raise AssertionError("ArgumentParser.error() returns never")


def table(program: str, *, old_contract: bool = False) -> list[Flag]:
    """Return the flags of a program, in the order of its help."""
    return _parser(program, old_contract, argparse.ArgumentParser)[1]


def _read(options: argparse.Namespace, flag: Flag, text: str, source: str) -> Any:
    try:
        return flag.read(text, **{name: getattr(options, name) for name in flag.needs})
    except ValueError as error:
        if source.startswith("-"):
            options.parser.error(f"argument {source}: {error}")
        options.parser.error(f"{source}={text!r}, set in the environment, is not usable: {error}")


def _check_variables(parser: argparse.ArgumentParser) -> None:
    """End as for an unusable flag where a variable that the ranks read has an unusable value."""
    for variable in _VARIABLES_OF_RANKS:
        try:
            variable.get()
        except ValueError as error:
            parser.error(str(error))


def _parser(
    program: str, old_contract: bool, kind: type[argparse.ArgumentParser]
) -> tuple[argparse.ArgumentParser, list[Flag]]:
    parser = kind(
        prog=program,
        usage=f"{program} [flags] script [arguments of the script]",
        description="Start a program as N ranks on each of one or several nodes, and end them together.",
        epilog="Every flag may be written with dashes or underscores; PET_<FLAG> or PROCGROUP_<FLAG> in the "
        "environment sets its default.",
        allow_abbrev=False,
    )
    flags = _Flags(parser)
    _add_size_flags(flags)
    _add_hosts_flags(flags)
    _add_rendezvous_flags(flags)
    _add_placement_flags(flags)
    _add_behaviour_flags(flags)
    _add_log_flags(flags)
    _add_program_flags(flags)
    if old_contract:
        flags.add_switch("--use-env", "leave out the --local-rank=N argument; LOCAL_RANK says the same")
    parser.add_argument("script", help="the program: a script, a module with -m, any command with --no-python")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    return parser, flags.added


class _Flags:
    """The flags of a parser, as they are added."""

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
        "seconds between asking ranks to end and killing them; 30 by default, 2 after Ctrl-C",
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


def log_options(options: argparse.Namespace) -> LogOptions:
    """Return what the parsed flags say about output."""
    is_default = options.sources["log_prefix"] == "default"
    return LogOptions(
        directory=options.log_dir,
        prefix=None if is_default else options.log_prefix,
        redirects=options.redirects,
        tee=options.tee,
        shown_ranks=options.show_ranks,
        shown_local_ranks=options.local_ranks_filter,
        filters=(options.duplicate_stdout_filters, options.duplicate_stderr_filters),
        collapse=options.collapse,
    )


def _add_program_flags(flags: _Flags) -> None:
    flags.add_switch("--module", "run a module, as python -m does", short=("-m",))
    flags.add_switch("--no-python", "run the program itself, without the Python interpreter")
    flags.add_switch(
        "--run-path", "run a script, folder or zip file in the launcher's interpreter; wins over -m and --no-python"
    )


def _spellings(flag: str) -> list[str]:
    underscored = "--" + flag[2:].replace("-", "_")
    return [flag] if not flag.startswith("--") or underscored == flag else [flag, underscored]


def _unknown_flag(parser: argparse.ArgumentParser, given: str) -> str:
    """Return what to say of a flag that does not exist, with the closest of those that the help shows."""
    import difflib  # needed for this sentence only

    name = given.partition("=")[0]
    meant = name.replace("_", "-").lower()
    known = sorted(flag for flag in set(re.findall(r"(?<!\S)--?[a-z][\w-]*", parser.format_help())) if "_" not in flag)
    close = [flag for flag in known if flag.startswith(meant)] or difflib.get_close_matches(meant, known, n=1)
    advice = f"did you mean {' or '.join(close)}?" if close else f"{parser.prog} --help lists the flags."
    return f"there is no flag {name}: {advice} Flags of the script follow the script's name."
