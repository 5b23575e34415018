"""``procgroup completion SHELL``: print a script that has the shell complete procgroup's commands and flags.

The script holds no flags. For each completion it runs ``procgroup completion words WORD...``, which prints what may
stand in the place of the last word: one candidate a line, a tab, a description. So an installed script knows the flags
of whatever version of procgroup is installed. Nothing printed means a file, or anything else that the shell completes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

from procgroup.__main__ import COMMANDS
from procgroup.launch import flags
from procgroup.launch.flags import Flag

# Bash passes "--flag=value" as three words, so the script splits the line itself, and returns the value alone.
_BASH = r"""
# Completion of procgroup and pgrun. In ~/.bashrc: eval "$(procgroup completion bash)"
_procgroup() {
    local line=${COMP_LINE:0:COMP_POINT} word words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    COMPREPLY=()
    while IFS=$'\t' read -r word _; do
        COMPREPLY+=("${word#*=}")
    done < <("${words[0]/%pgrun/procgroup}" completion words "${words[@]}" 2>/dev/null)
}
complete -o default -F _procgroup procgroup pgrun
"""

_ZSH = r"""
#compdef procgroup pgrun
# Completion of procgroup and pgrun. In ~/.zshrc, after compinit: eval "$(procgroup completion zsh)"
_procgroup() {
    local -a found described
    local line
    found=("${(@f)$(${words[1]/%pgrun/procgroup} completion words "${(@)words[1,CURRENT]}" 2>/dev/null)}")
    for line in "${(@)found:#}"; do
        described+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
    done
    if (( $#described )); then
        _describe procgroup described
    else
        _files
    fi
}
compdef _procgroup procgroup pgrun
"""

_FISH = r"""
# Completion of procgroup and pgrun: procgroup completion fish > ~/.config/fish/completions/procgroup.fish
function __procgroup_find
    set -l words (commandline --tokenize --cut-at-cursor --current-process)
    set -a words (commandline --cut-at-cursor --current-token)
    set -l program (string replace --regex 'pgrun$' procgroup -- $words[1])
    set -g __procgroup_found ($program completion words $words 2>/dev/null)
    test (count $__procgroup_found) -gt 0
end
complete --command procgroup --no-files --condition __procgroup_find --arguments '$__procgroup_found'
complete --command pgrun --no-files --condition __procgroup_find --arguments '$__procgroup_found'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


class Candidate(NamedTuple):
    """One way to complete a word."""

    word: str
    text: str


def main(arguments: Sequence[str]) -> int:
    """Print the script of a shell, or the candidates for the last word of a command line; return the exit status."""
    if arguments and arguments[0] == "words":
        for candidate in candidates(arguments[1:]):
            print(f"{candidate.word}\t{candidate.text}")
        return 0
    if len(arguments) == 1 and arguments[0] in SCRIPTS:
        print(SCRIPTS[arguments[0]].strip())
        return 0
    print(f"usage: procgroup completion {{{','.join(SCRIPTS)}}}: print the shell's completion script", file=sys.stderr)
    return 0 if list(arguments) in (["-h"], ["--help"]) else 2


def candidates(words: Sequence[str]) -> Iterator[Candidate]:
    """Yield what may stand in the place of the last of the words of a command line; its first word is the program."""
    program, *rest = words or [""]
    if program.endswith("pgrun"):
        rest = ["run", *rest]
    if len(rest) <= 1:
        commands = (Candidate(name, command.summary) for name, command in COMMANDS.items())
        yield from _starting(rest[-1] if rest else "", commands)
    elif rest[0] in ("run", "launch"):
        yield from _of_launcher(flags.table("", old_contract=rest[0] == "launch"), rest[1:])
    elif rest[0] in ("doctor", "explain", "top"):
        table: dict[str, str] = import_module(COMMANDS[rest[0]].module).FLAGS  # imported for this command only
        yield from _starting(rest[-1], (Candidate(name, text) for name, text in table.items()))
    elif rest[0] == "completion" and len(rest) == 2:
        yield from _starting(rest[1], (Candidate(shell, "print its completion script") for shell in SCRIPTS))


def _of_launcher(table: Sequence[Flag], words: Sequence[str]) -> Iterator[Candidate]:
    """Yield candidates for a flag of the launcher, or for its value; none for the script and its arguments."""
    by_name = {spelling: flag for flag in table for spelling in (flag.name, *flag.short)}
    *before, current = words
    awaiting: Flag | None = None
    for word in before:
        if awaiting is None and not word.startswith("-"):
            return
        flag = by_name.get(word.replace("_", "-"))
        awaiting = flag if awaiting is None and flag is not None and flag.metavar else None
    name, equals, value = current.partition("=")
    if awaiting is not None:
        yield from _starting(current, _values(awaiting))
    elif equals and (flag := by_name.get(name.replace("_", "-"))):
        yield from _starting(value, _values(flag), f"{name}=")
    elif current.startswith("-"):
        yield from _starting(current.replace("_", "-"), (Candidate(flag.name, flag.text) for flag in table))


def _values(flag: Flag) -> Iterator[Candidate]:
    return (Candidate(word, "") for word in flag.words)


def _starting(beginning: str, found: Iterator[Candidate], prefix: str = "") -> Iterator[Candidate]:
    return (Candidate(prefix + word, text) for word, text in found if word.startswith(beginning))
