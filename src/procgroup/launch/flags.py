"""The flags of ``procgroup run``: one table of torchrun's names and procgroup's own, and the parser for it.

Each row of the table holds a flag's name, the function that reads its text, its default and its help. The parser,
``--help``, completions for shells and ``--dry-run`` are derived from it.

A value comes from the first of: the flag, PET_<FLAG> (torchrun's name), PROCGROUP_<FLAG>, the default. The source of
each value is kept, for messages and for ``--dry-run``. A function that reads a text raises ValueError for an unusable
one.
"""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from procgroup.cluster.control_group import usable_cores
from procgroup.launch.output.log_options import LogOptions, chosen_ranks, collapse, filters, prefix, streams
from procgroup.process.environ import (
    PROCGROUP_JOB_KEY,
    PROCGROUP_TRANSPORT,
    PROCGROUP_WAIT_REPORT_SECONDS,
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT,
    Variable,
    launcher_flag,
)

if TYPE_CHECKING:
    from procgroup.cluster.addresses import Host


class NodeRange(NamedTuple):
    """How many nodes a job may have."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


MOST_PROCESSES = 999_999
"""The largest number of ranks on a node, and of nodes."""

MOST_SECONDS = 1e9
"""The longest accepted time, some thirty years: threads can wait for nine times as long."""

_MOST = 999_999_999
_MOST_SHOWN = 60

RENDEZVOUS_BACKENDS = ("static", "c10d", "file", "etcd", "etcd-v2", "redis")
BINDINGS = ("node", "socket", "exclusive", "core-complex", "cores")

# Keys of torchrun, with the same meaning. The last three of _CONF_SECONDS belong to backends that do not exist here,
# and have no effect.
_CONF_SECONDS = (
    "join_timeout",
    "last_call_timeout",
    "keep_alive_interval",
    "timeout",
    "read_timeout",
    "close_timeout",
    "heartbeat_timeout",
)
_CONF_OTHERS = (
    "keep_alive_max_attempt",
    "is_host",
    "store_type",
    "use_libuv",
    "protocol",
    "user",
    "cacert",
    "ssl_cert",
    "ssl_cert_key",
)


def truth(value: str) -> bool:
    """Read 1 or 0."""
    if value not in ("", "0", "1"):
        raise ValueError("expected 1 or 0")
    return value == "1"


def process_count(value: str, gpus: Sequence[str] = ()) -> int:
    """Read a number of ranks; ``auto`` is the number of GPUs, or of usable cores where there are none.

    ``gpus`` is the value of ``--gpus``: only these count.
    """
    if value == "cpu":
        return usable_cores()
    if value in ("gpu", "auto"):
        from procgroup.cluster.accelerators import visible_gpus  # which most jobs do not need

        found = len(gpus) or visible_gpus()
        if value == "gpu" and not found:
            raise ValueError("gpu: this host shows no GPU; give a number, cpu or auto")
        return found or usable_cores()
    return number(value, 1, "a number of at least 1, cpu, gpu or auto", most=MOST_PROCESSES)


def gpus(value: str) -> list[str]:
    """Read GPUs as CUDA_VISIBLE_DEVICES names them, also ranges of numbers; an empty text means none."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in value.split(","))):
        numbers = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part, re.ASCII)
        named = [part] if re.fullmatch(r"(GPU|MIG)-[\w/-]+", part, re.ASCII) else []
        new = [str(gpu) for gpu in range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)] if numbers else named
        if not new:
            raise ValueError(f"expected GPUs by number or UUID, such as 0,2-3 or GPU-8d0b77ac, got {part!r}")
        found += new
    if twice := next((gpu for gpu in found if found.count(gpu) > 1), None):
        raise ValueError(f"GPU {twice} is listed twice in {value!r}")
    return found


def node_range(value: str) -> NodeRange:
    """Read N or MIN:MAX with 0 < MIN <= MAX."""
    expected = "N or MIN:MAX with 0 < MIN <= MAX"
    least, colon, most = value.partition(":")
    bounds = (least, most if colon else least)
    found = NodeRange(*(number(bound, 1, expected, value, most=MOST_PROCESSES) for bound in bounds))
    if found.least > found.most:
        raise ValueError(f"expected {expected}, got {value!r}")
    return found


def count(value: str) -> int:
    """Read a number of at least 0."""
    return number(value, 0, "a number of at least 0")


def port(value: str) -> int | None:
    """Read a port; None for an empty text, and for 0, which means any free port."""
    if value in ("", "0"):
        return None
    if (found := number(value, 0, "a port from 0 to 65535")) > 65535:
        raise ValueError(f"expected a port from 0 to 65535, got {value!r}")
    return found


def host(value: str) -> str:
    """Read a host's name or address; an IPv6 address may stand in brackets."""
    found = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if not found:
        raise ValueError(f"expected a host's name or address, got {value!r}")
    return found


def optional_host(value: str) -> str:
    """Read a host's name or address, or an empty text."""
    return host(value) if value else ""


def hosts(value: str) -> list[Host]:
    """Read a list of hosts, such as a:4,b:4; an empty text means none."""
    if not value:
        return []
    from procgroup.cluster.addresses import parse_hosts

    return parse_hosts(value)


def hostfile(value: str) -> list[Host]:
    """Read the hosts of a file; an empty name means none."""
    if not value:
        return []
    from procgroup.cluster.addresses import read_hostfile

    return read_hostfile(value)


def number(value: str, least: int, expected: str, shown: str | None = None, *, most: int = _MOST) -> int:
    """Read a number. ``expected`` describes it in the error; ``shown`` is the whole text of which it is a part."""
    got = _shortened(value if shown is None else shown)
    is_number = value.isascii() and value.isdigit()
    if is_number and len(value) > len(str(most)):  # compared by length: int() refuses thousands of digits
        raise ValueError(f"expected {expected}, and at most {most}, got {got}")
    if not is_number or int(value) < least:
        raise ValueError(f"expected {expected}, got {got}")
    return int(value)


def optional_seconds(value: str) -> float | None:
    """Read a number of seconds; None for an empty text."""
    return None if value == "" else seconds(value)


def seconds(value: str) -> float:
    """Read a number of seconds of at least 0."""
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise ValueError(f"expected a number of seconds of at least 0, got {_shortened(value)}")
    if found > MOST_SECONDS:
        raise ValueError(f"expected at most {MOST_SECONDS:.0f} seconds, got {_shortened(value)}")
    return found


def _shortened(value: str) -> str:
    """Return the text in quotes; a long text is cut."""
    return repr(value) if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]!r}... ({len(value)} characters)"


def signals(value: str) -> list[signal.Signals]:
    """Read names of signals. Raises ValueError for unknown names, and for SIGKILL, SIGSTOP and SIGCHLD."""
    chosen: list[signal.Signals] = []
    for name in filter(None, (part.strip() for part in value.split(","))):
        found = getattr(signal, name, None)
        if not isinstance(found, signal.Signals):
            raise ValueError(f"expected names of signals such as SIGTERM,SIGINT, got {name!r}")
        if found in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise ValueError(f"expected signals that the launcher can forward, such as SIGTERM,SIGINT, got {name!r}")
        chosen.append(found)
    return chosen


def rendezvous_backend(value: str) -> str:
    """Read the name of a rendezvous backend."""
    return one_of(RENDEZVOUS_BACKENDS, "static", value.lower())


def one_of(words: Sequence[str], default: str, value: str) -> str:
    """Read one of the words, or the default."""
    if value not in (*words, default):
        raise ValueError(f"expected {' or '.join(words)}, got {value!r}")
    return value


def rendezvous_conf(value: str) -> dict[str, str]:
    """Read ``key=value,key=value``; the keys are torchrun's."""
    found = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        key, equals, said = (word.strip() for word in part.partition("="))
        if not equals or not said:
            raise ValueError(f"expected key=value,key=value, got {part!r}")
        if key not in (*_CONF_SECONDS, *_CONF_OTHERS):
            raise ValueError(f"expected one of the keys {', '.join((*_CONF_SECONDS, *_CONF_OTHERS))}, got {key!r}")
        if key in _CONF_SECONDS:
            try:
                seconds(said)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
        if key == "keep_alive_max_attempt":
            number(said, 1, "keep_alive_max_attempt to be a number of at least 1")
        if key == "is_host" and _truth_word(said) not in ("0", "1"):
            raise ValueError(f"expected is_host to be 1 or 0, got {said!r}")
        found[key] = said
    silence = conf_seconds(found, "keep_alive_interval", 1.0) * int(found.get("keep_alive_max_attempt", 1))
    if silence > MOST_SECONDS:
        most = f"{MOST_SECONDS:.0f} seconds"
        raise ValueError(
            f"expected keep_alive_interval times keep_alive_max_attempt to be at most {most}, got {value!r}"
        )
    return found


def conf_seconds(conf: dict[str, str], key: str, default: float) -> float:
    """Return a number of seconds of ``--rdzv-conf``."""
    return float(conf.get(key, default))


def conf_is_host(conf: dict[str, str]) -> bool | None:
    """Return the key is_host of ``--rdzv-conf``: whether this node hosts the store; None without that key."""
    return truth(_truth_word(conf["is_host"])) if "is_host" in conf else None


def _truth_word(word: str) -> str:
    return {"true": "1", "t": "1", "yes": "1", "false": "0", "f": "0", "no": "0"}.get(word.lower(), word)


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


def _switch(name: str, text: str, short: Sequence[str] = ()) -> Flag:
    """Return a flag without a value."""
    return Flag(name, "", truth, "0", text, short)


def _choice(name: str, metavar: str, words: Sequence[str], default: str, text: str, short: Sequence[str] = ()) -> Flag:
    """Return a flag whose value is one of ``words``, or the default."""
    return Flag(name, metavar, partial(one_of, words, default), default, text, short, words)


_STREAMS = "0 none, 1 stdout, 2 stderr, 3 both; by local rank: 0:1,10:3"
_FILTERED = "keep lines of {0} with one of these words, separated by commas, in filtered_{0}.log too"

_WITH_HOSTS = (
    Flag("--ssh", "COMMAND", str, "ssh", "with --hosts: OpenSSH's client and its options"),
    Flag("--ssh-timeout", "SECONDS", seconds, "60", "with --hosts: how long the hosts may take to be ready"),
    Flag("--chdir", "PATH", str, "", "with --hosts: working directory there, by default this one"),
    Flag("--export", "NAME,NAME=VALUE", str, "", "with --hosts: further variables for the ranks there"),
    Flag("--remote-python", "PATH", str, "", "with --hosts: interpreter there, by default this one"),
)
"""The flags that need --hosts or --hostfile."""

_FLAGS = (
    # The size of the job, and where it meets on one host.
    Flag("--gpus", "LIST", gpus, "", "GPUs of this host that the ranks may use, such as 0,2-3"),
    Flag(
        "--nproc-per-node",
        "N",
        process_count,
        "1",
        "ranks to start on this node: a number, cpu, gpu, or auto",
        short=("-n", "-np"),
        words=("auto", "cpu", "gpu"),
        needs=("gpus",),
    ),
    Flag("--nnodes", "N", node_range, "1:1", "nodes of the job: N, or MIN:MAX"),
    Flag("--node-rank", "N", count, "0", "this node's number, from 0, with --rdzv-backend static"),
    Flag("--max-restarts", "N", count, "0", "how often the job may start its ranks again"),
    _switch("--replace", "start only a failed rank again, while the others go on; --max-restarts says how often"),
    _switch(
        "--keep-going", "let the others go on when a rank fails; the job succeeds when one of them does (one node)"
    ),
    _switch("--standalone", "one node, nothing to configure; this is the default"),
    Flag("--master-addr", "HOST", host, "127.0.0.1", "MASTER_ADDR of the ranks: the first node"),
    Flag("--master-port", "PORT", port, "", "MASTER_PORT: where the nodes meet; on one node any free one"),
    # Hosts that this command starts the ranks on.
    Flag("--hosts", "LIST", hosts, "", "start the ranks on these hosts over ssh: a:4,b:4; see --hostfile"),
    Flag("--hostfile", "PATH", hostfile, "", "the same from a file, a line each: host slots=4"),
    *_WITH_HOSTS,
    # How several nodes meet.
    Flag(
        "--rdzv-backend",
        "NAME",
        rendezvous_backend,
        "static",
        "how the nodes meet: static, c10d, file, etcd or redis",
        words=RENDEZVOUS_BACKENDS,
    ),
    Flag("--rdzv-endpoint", "PLACE", str, "", "where: host[:port] of a node or server, or several; a path; a URL"),
    Flag("--rdzv-id", "NAME", str, "", "the job's name, the same on every node; TORCHELASTIC_RUN_ID"),
    Flag("--rdzv-conf", "LIST", rendezvous_conf, "", "further settings: key=value,key=value"),
    Flag("--local-addr", "HOST", optional_host, "", "this node's address for the other nodes, if it is not detected"),
    _choice(
        "--on-partition",
        "WHAT",
        ("continue", "stop"),
        "",
        "whether one half of the nodes goes on when it cannot reach the other: continue or stop",
    ),
    # The GPUs and CPUs of the ranks.
    _switch("--virtual-local-rank", "show each rank one GPU only, as device 0, and set LOCAL_RANK to 0"),
    _choice(
        "--numa-binding",
        "WHAT",
        BINDINGS,
        "",
        f"bind each rank to CPUs, near its GPU if known: {', '.join(BINDINGS)}",
        short=("--bind",),
    ),
    # Behaviour.
    Flag("--role", "NAME", str, "default", "ROLE_NAME of the ranks"),
    _switch("--replace-gloo", "let PyTorch programs that request gloo run on procgroup"),
    _switch("--replace-nccl", "let PyTorch programs that request nccl run on procgroup, which calls NCCL"),
    Flag(
        "--shutdown-timeout",
        "SECONDS",
        optional_seconds,
        "",
        "seconds from SIGTERM to SIGKILL for the ranks; 30 by default, 2 after Ctrl-C",
        variable=TORCH_ELASTIC_SHUTDOWN_TIMEOUT,
    ),
    Flag(
        "--signals-to-handle",
        "NAMES",
        signals,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "signals that end the ranks, separated by commas",
    ),
    Flag("--monitor-interval", "S", optional_seconds, "", "has no effect: ranks are watched by events"),
    _choice(
        "--start-method",
        "NAME",
        ("spawn", "fork", "forkserver"),
        "spawn",
        "no effect here: it applies to functions only",
    ),
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
        optional_seconds,
        "",
        "kill a rank that is stopped, stuck in the kernel, or has made no further procgroup.report for this time",
    ),
    _switch("--dry-run", "show how each rank would be started, and the source of each value"),
    # Output.
    Flag("--log-dir", "PATH", str, "", "keep each rank's stdout.log and stderr.log below this folder"),
    _choice("--logs-specs", "NAME", ("default",), "default", 'only "default" is supported'),
    Flag("--redirects", "STREAMS", streams, "0", f"keep in files and do not show: {_STREAMS}", ("-r",)),
    Flag("--tee", "STREAMS", streams, "0", f"keep in files and show: {_STREAMS}", ("-t",)),
    Flag("--show-ranks", "RANKS", chosen_ranks, "", "show these ranks only, such as 0,3-5; files have all"),
    Flag("--local-ranks-filter", "RANKS", chosen_ranks, "", "the same, by local rank"),
    Flag("--duplicate-stdout-filters", "WORDS", filters, "", _FILTERED.format("stdout")),
    Flag("--duplicate-stderr-filters", "WORDS", filters, "", _FILTERED.format("stderr")),
    Flag("--log-prefix", "TEMPLATE", prefix, "", "prefix of each line, such as '[r{rank} {host}]'"),
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


# Variables without a flag, checked here because ranks would report an unusable value later, or only in some jobs.
_VARIABLES_OF_RANKS = (PROCGROUP_JOB_KEY, PROCGROUP_TRANSPORT, PROCGROUP_WAIT_REPORT_SECONDS)


class _RaisingParser(argparse.ArgumentParser):
    """A parser that raises ValueError for an unusable value, where argparse ends the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(
    program: str, arguments: Sequence[str], *, old_contract: bool = False, in_program: bool = False
) -> argparse.Namespace:
    """Parse the command line; ``old_contract`` adds ``--use-env``.

    ``options.texts`` and ``options.sources`` are the text and the source of each value. An unusable value ends the
    program with status 2 and the reason. With ``in_program``, for callers other than commands, it raises ValueError,
    and the variables PET_<FLAG> and PROCGROUP_<FLAG> are not read.
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
    _check_combinations(parser, options, old_contract)
    return options


def _check_combinations(parser: argparse.ArgumentParser, options: argparse.Namespace, old_contract: bool) -> None:
    if options.module and options.no_python and not options.run_path:
        parser.error("--module and --no-python exclude each other: omit one of them")
    if old_contract and options.no_python and not options.use_env:
        parser.error("--no-python needs --use-env: --local-rank is passed to Python programs only")
    given = [flag.name for flag in _WITH_HOSTS if options.sources[flag.destination] == flag.name]
    if given and not (options.hosts or options.hostfile):
        parser.error(f"{given[0]} needs --hosts or --hostfile: add one, or leave {given[0]} out")


def refuse(options: argparse.Namespace, text: str) -> NoReturn:
    """End the program with status 2 and this reason, as for an unusable flag."""
    options.parser.error(text)
    raise AssertionError("ArgumentParser.error() never returns")


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
    """End the program as for an unusable flag where a variable that the ranks read has an unusable value."""
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
    flags = [*_FLAGS, _USE_ENV] if old_contract else list(_FLAGS)
    for flag in flags:
        flag.add_to(parser)
    parser.add_argument("script", help="the program: a script, a module with -m, any command with --no-python")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    return parser, flags


def log_options(options: argparse.Namespace) -> LogOptions:
    """Return the parsed flags about output."""
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


# Of flags in other launchers, and of the same number in spawn().
_OTHERS_NAMES = {name: ["--nproc-per-node"] for name in ("--nprocs", "--np", "--num-processes", "--ntasks")}


def _unknown_flag(parser: argparse.ArgumentParser, given: str) -> str:
    """Return the error for an unknown flag, with the most similar flags of the help."""
    import difflib  # needed for this sentence only

    name = given.partition("=")[0]
    meant = name.replace("_", "-").lower()
    known = sorted(flag for flag in set(re.findall(r"(?<!\S)--?[a-z][\w-]*", parser.format_help())) if "_" not in flag)
    close = (
        [flag for flag in known if flag.startswith(meant)]
        or _OTHERS_NAMES.get(meant)
        or difflib.get_close_matches(meant, known, n=1)
    )
    advice = f"did you mean {' or '.join(close)}?" if close else f"{parser.prog} --help lists the flags."
    return f"there is no flag {name}: {advice} Flags of the script follow the script's name."
