"""The flags of ``procgroup run``: torchrun's names, in both spellings, with defaults from PET_* variables.

A flag of torchrun that this launcher does not have yet is refused by name with the reason; it is never
ignored, and never an unknown argument.
"""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from procgroup.cluster.accelerators import visible_gpus
from procgroup.cluster.cores import usable_cores
from procgroup.environ import TORCH_ELASTIC_SHUTDOWN_TIMEOUT, launcher_flag
from procgroup.launch.log_options import LogOptions, collapse, filters, prefix, streams
from procgroup.launch.rank_ranges import parse_ranks

_ONE_NODE = "it serves jobs of several nodes, and this launcher runs on one node only"
_REFUSED = {
    "--rdzv-backend": _ONE_NODE,
    "--rdzv-endpoint": _ONE_NODE,
    "--rdzv-conf": _ONE_NODE,
    "--local-addr": _ONE_NODE,
    "--monitor-interval": "ranks are watched by events, without an interval",
    "--start-method": "it applies to functions; use procgroup.start_processes(..., start_method=...)",
    "--event-log-handler": "there is no event log yet",
    "--logs-specs": "log plug-ins do not exist here; use --log-dir",
    "--numa-binding": "ranks are not bound yet; use numactl with --no-python",
    "--virtual-local-rank": "devices are not divided among the ranks yet; use LOCAL_RANK to choose one",
    "--run-path": "give the script itself",
}


class Refuse(argparse.Action):
    """Ends the program with a sentence that names the flag and the reason."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string} is not supported: {self.metavar}")


def parse(program: str, arguments: Sequence[str], *, old_contract: bool = False) -> argparse.Namespace:
    """Parse the command line; ``old_contract`` adds ``--use-env``.

    An unusable one ends the program with status 2 and the reason.
    """
    parser = _parser(program, old_contract)
    for flag, reason in _REFUSED.items():
        variable = launcher_flag(flag)
        if flag.startswith("--") and variable.is_set():
            parser.error(f"{variable.name}, set in the environment, is not supported: {reason}")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_unknown_flag(parser, unknown[0]))
    if options.module and options.no_python:
        parser.error("--module and --no-python exclude each other: without Python there are no modules")
    if old_contract and options.no_python and not options.use_env:
        parser.error("--no-python needs --use-env: a program that is not Python gets no --local-rank argument")
    options.parser = parser
    return options


def _parser(program: str, old_contract: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [flags] script [arguments of the script]",
        description="Start a program as N ranks on this host and end them together.",
        epilog="Every flag may be written with dashes or underscores; PET_<FLAG> in the environment sets its default.",
        allow_abbrev=False,
    )
    _add_size_flags(parser)
    _add_behaviour_flags(parser)
    _add_log_flags(parser)
    _add_program_flags(parser)
    if old_contract:
        _add(parser, "--use-env", bool, False, "leave out the --local-rank=N argument; LOCAL_RANK says the same")
    for flag, reason in _REFUSED.items():
        parser.add_argument(*_spellings(flag), action=Refuse, nargs="?", metavar=reason, help=argparse.SUPPRESS)
    parser.add_argument("script", help="the program: a script, a module with -m, any command with --no-python")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    return parser


def _add_size_flags(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        "--nproc-per-node",
        _process_count,
        "1",
        "ranks to start: a number, cpu, gpu, or auto",
        "N",
        short=("-n", "-np"),
    )
    _add(parser, "--nnodes", _one_node, "1", "1, the only number yet", "N")
    _add(parser, "--node-rank", _only_zero, "0", "0, the only node", "N")
    _add(parser, "--max-restarts", _only_zero, "0", "0, the only number yet", "N")
    _add(parser, "--standalone", bool, False, "one node, nothing to configure; this is the default")
    _add(parser, "--master-addr", str, "127.0.0.1", "MASTER_ADDR of the ranks: this host", "HOST")
    _add(parser, "--master-port", _port, "0", "MASTER_PORT, kept for the ranks; 0 takes a free one", "PORT")


def _add_behaviour_flags(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--rdzv-id", str, "", "the job's name, TORCHELASTIC_RUN_ID; random by default", "NAME")
    _add(parser, "--role", str, "default", "ROLE_NAME of the ranks", "NAME")
    _add(parser, "--replace-gloo", bool, False, "let PyTorch programs that say gloo run on procgroup")
    _add(
        parser,
        "--shutdown-timeout",
        _seconds,
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT.get() or None,
        "seconds between asking ranks to end and killing them; 30 by default, 2 after Ctrl-C",
        "SECONDS",
    )
    _add(
        parser,
        "--signals-to-handle",
        _signals,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "signals that are passed on to the ranks, separated by commas",
        "NAMES",
    )


def _add_log_flags(parser: argparse.ArgumentParser) -> None:
    what = "0 none, 1 stdout, 2 stderr, 3 both; by local rank: 0:1,10:3"
    _add(parser, "--log-dir", str, "", "keep each rank's stdout.log and stderr.log below this directory", "PATH")
    _add(parser, "--redirects", streams, "0", f"keep in files and do not show: {what}", "STREAMS", short=("-r",))
    _add(parser, "--tee", streams, "0", f"keep in files and show: {what}", "STREAMS", short=("-t",))
    _add(parser, "--show-ranks", parse_ranks, None, "show these ranks only, such as 0,3-5; files have all", "RANKS")
    _add(parser, "--local-ranks-filter", parse_ranks, None, "the same, by local rank", "RANKS")
    for name in ("stdout", "stderr"):
        text = f"keep lines of {name} with one of these words, separated by commas, in filtered_{name}.log too"
        _add(parser, f"--duplicate-{name}-filters", filters, (), text, "WORDS")
    _add(parser, "--log-prefix", prefix, None, "what stands before each line, such as '[r{rank} {host}]'", "TEMPLATE")
    _add(
        parser,
        "--collapse",
        collapse,
        "auto",
        "show equal lines of several ranks once: always, never, or auto, on a terminal from 9 ranks on",
        "WHEN",
    )


def log_options(options: argparse.Namespace) -> LogOptions:
    """Return what the parsed flags say about output."""
    return LogOptions(
        directory=options.log_dir,
        prefix=options.log_prefix,
        redirects=options.redirects,
        tee=options.tee,
        shown_ranks=options.show_ranks,
        shown_local_ranks=options.local_ranks_filter,
        filters=(options.duplicate_stdout_filters, options.duplicate_stderr_filters),
        collapse=options.collapse,
    )


def _add_program_flags(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--module", bool, False, "run a module, as python -m does", short=("-m",))
    _add(parser, "--no-python", bool, False, "run the program itself, without the Python interpreter")


def _add(
    parser: argparse.ArgumentParser,
    flag: str,
    kind: Callable[[str], Any],
    default: str | bool | tuple[str, ...] | None,
    text: str,
    metavar: str | None = None,
    short: Sequence[str] = (),
) -> None:
    """Add one flag in both spellings and in short ones, with its PET_ variable as default."""
    spellings = [*short, *_spellings(flag)]
    set_by = launcher_flag(flag).get()
    if kind is bool:
        parser.add_argument(*spellings, action="store_true", default=_truth(parser, flag, set_by), help=text)
    else:
        parser.add_argument(*spellings, type=kind, default=set_by or default, metavar=metavar, help=text)


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


def _truth(parser: argparse.ArgumentParser, flag: str, text: str) -> bool:
    if text not in ("", "0", "1"):
        parser.error(f"{launcher_flag(flag).name}={text!r}, set in the environment, is not usable: expected 1 or 0")
    return text == "1"


def _process_count(text: str) -> int:
    """Read a number of ranks; ``auto`` is the number of GPUs, or of usable cores where there are none."""
    if text == "cpu":
        return usable_cores()
    if text in ("gpu", "auto"):
        gpus = visible_gpus()
        if text == "gpu" and not gpus:
            raise argparse.ArgumentTypeError("gpu: this host shows no GPU; give a number, cpu or auto")
        return gpus or usable_cores()
    return _number(text, 1, "a number of at least 1, cpu, gpu or auto")


def _one_node(text: str) -> int:
    if text not in ("1", "1:1"):
        raise argparse.ArgumentTypeError(f"{text} is not supported: this launcher runs on one node only")
    return 1


def _only_zero(text: str) -> int:
    if text != "0":
        reason = "this launcher runs on one node and does not restart ranks; only 0 works"
        raise argparse.ArgumentTypeError(f"{text} is not supported: {reason}")
    return 0


def _port(text: str) -> int:
    port = _number(text, 0, "a port from 0 to 65535")
    if port > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return port


def _number(text: str, least: int, expected: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds of at least 0, got {text!r}")
    return value


def _signals(text: str) -> list[signal.Signals]:
    """Read names of signals; those that no process can handle are refused."""
    chosen: list[signal.Signals] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        number = getattr(signal, name, None)
        if not isinstance(number, signal.Signals):
            raise argparse.ArgumentTypeError(f"expected names of signals such as SIGTERM,SIGINT, got {name!r}")
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise argparse.ArgumentTypeError(f"{name} cannot be passed on to the ranks")
        chosen.append(number)
    return chosen
