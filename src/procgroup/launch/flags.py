"""Parse the command line of ``procgroup run``; defaults come from the environment.

A flag wins over its variable PET_<FLAG> (torchrun's), that variable over PROCGROUP_<FLAG>, and that one over the
default. The source of each value is kept, for messages and for ``--dry-run``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from procgroup.environ import PROCGROUP_JOB_KEY, PROCGROUP_TRANSPORT, PROCGROUP_WAIT_REPORT_SECONDS
from procgroup.launch.flag_table import Flag, add_flags
from procgroup.launch.output.log_options import LogOptions

# Variables without a flag, checked here because ranks would report an unusable value later, or only in some jobs.
_VARIABLES_OF_RANKS = (PROCGROUP_JOB_KEY, PROCGROUP_TRANSPORT, PROCGROUP_WAIT_REPORT_SECONDS)

_WITH_HOSTS = ("--ssh", "--ssh-timeout", "--chdir", "--export", "--remote-python")


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
        parser.error("--module and --no-python exclude each other: without Python there are no modules")
    if old_contract and options.no_python and not options.use_env:
        parser.error("--no-python needs --use-env: a program that is not Python gets no --local-rank argument")
    given = [flag for flag in _WITH_HOSTS if options.sources[flag[2:].replace("-", "_")] == flag]
    if given and not (options.hosts or options.hostfile):
        parser.error(f"{given[0]} needs --hosts or --hostfile: without them nothing is started on another host")


def refuse(options: argparse.Namespace, text: str) -> NoReturn:
    """End the program with status 2 and this reason, as for an unusable flag."""
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
    flags = add_flags(parser, old_contract=old_contract)
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
