"""Select the variables of the command's environment that ranks on other hosts get."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from procgroup.environ import (
    PROCGROUP_MASTER,
    PROCGROUP_NOTICE,
    PROCGROUP_REPORT_SOCKET,
    PROCGROUP_STORE,
    PROCGROUP_STORE_KEY,
)

EXPORTED_PREFIXES = ("PROCGROUP_", "OMP_", "MKL_", "OPENBLAS_", "NCCL_", "TORCH_", "JAX_", "XLA_", "PYTHON")
"""Variables whose names begin so are exported without --export."""

# Variables of another job, of which this command is itself a rank.
_OF_ANOTHER_JOB = {
    variable.name
    for variable in (
        PROCGROUP_MASTER,
        PROCGROUP_NOTICE,
        PROCGROUP_REPORT_SOCKET,
        PROCGROUP_STORE,
        PROCGROUP_STORE_KEY,
    )
}


def exported_environment(asked: str, base: Mapping[str, str], flags: Collection[str]) -> dict[str, str]:
    """Return the variables of ``base`` that are exported, and those of ``asked``: ``NAME,NAME=VALUE``.

    Variables that set one of the launcher's ``flags`` are left out, because agents get the flags themselves. Raises
    ValueError for an invalid name, and for one that is not set.
    """
    kept_back = _OF_ANOTHER_JOB | {f"PROCGROUP_{flag.upper()}" for flag in flags}
    found = {name: value for name, value in base.items() if name.startswith(EXPORTED_PREFIXES)}
    return {name: value for name, value in found.items() if name not in kept_back} | _asked(asked, base)


def _asked(text: str, base: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not name.isidentifier():
            raise ValueError(f"expected NAME,NAME=VALUE, got the name {name!r}; use NAME for a value with commas")
        if not equals and name not in base:
            raise ValueError(f"{name} is not set here; set it, or write {name}=VALUE")
        found[name] = value if equals else base[name]
    return found
