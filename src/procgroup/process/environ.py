"""The one table of environment variables: every name that procgroup reads, its type, default and meaning.

No other file reads ``os.environ`` for a variable of its own; they call the readers below.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Variable(NamedTuple, Generic[T]):
    """One environment variable. ``get()`` reads it now; an unusable value raises ValueError that names it.

    The value of one that ``is_secret`` is not shown.
    """

    name: str
    parse: Callable[[str], T]
    default: T
    meaning: str
    is_secret: bool = False

    def get(self) -> T:
        text = os.environ.get(self.name)
        if text is None or text == "":
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            shown = f" ({len(text)} characters)" if self.is_secret else f"={text!r}"
            raise ValueError(f"environment variable {self.name}{shown} is not usable: {error}") from error

    def is_set(self) -> bool:
        return bool(os.environ.get(self.name))


def _text(name: str, meaning: str) -> Variable[str]:
    """Return a variable whose value is any text, by default an empty one."""
    return Variable(name, str, "", meaning)


def _flag(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 1 or 0")


def _transport(text: str) -> str:
    if text not in ("auto", "shm", "tcp"):
        raise ValueError("expected auto, shm or tcp")
    return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected an integer") from None


def _seconds(text: str) -> float:
    expected = ValueError("expected a number of seconds, or 0 for never")
    try:
        seconds = float(text)
    except ValueError:
        raise expected from None
    if not 0 <= seconds < float("inf"):
        raise expected
    return seconds


def _hex(text: str) -> str:
    expected = ValueError("expected hex digits, two for each byte")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise expected from None
    if not key:  # blanks alone, which would be no key
        raise expected
    return text


def _log_level(text: str) -> str:
    if text.lower() not in ("debug", "info", "warning", "error", "off"):
        raise ValueError("expected debug, info, warning, error or off")
    return text.lower()


def _debug_level(text: str) -> str:
    if text.upper() not in ("OFF", "INFO", "DETAIL"):
        raise ValueError("expected OFF, INFO or DETAIL")
    return text.upper()


RANK = Variable[int | None]("RANK", _integer, None, "This process's global rank.")
WORLD_SIZE = Variable[int | None]("WORLD_SIZE", _integer, None, "How many ranks there are.")
LOCAL_RANK = Variable[int | None]("LOCAL_RANK", _integer, None, "This process's rank on its host.")
LOCAL_WORLD_SIZE = Variable[int | None]("LOCAL_WORLD_SIZE", _integer, None, "How many ranks this host has.")
MASTER_ADDR = _text("MASTER_ADDR", "Where the store listens: host name or address.")
MASTER_PORT = Variable[int | None]("MASTER_PORT", _integer, None, "Where the store listens: TCP port.")
PROCGROUP_INIT_METHOD = _text("PROCGROUP_INIT_METHOD", "The init_method when none is given.")
TORCH_DISTRIBUTED_INIT_METHOD = _text(
    "TORCH_DISTRIBUTED_INIT_METHOD", "The same, under torch's name; PROCGROUP_INIT_METHOD wins."
)
PROCGROUP_STORE = _text(
    "PROCGROUP_STORE", "host:port of a store that the launcher hosts; ranks connect to it as clients."
)
PROCGROUP_MASTER = _text(
    "PROCGROUP_MASTER",
    "host:port in whose place PROCGROUP_STORE is used: the launcher's MASTER_ADDR:MASTER_PORT. By default its own.",
)
PROCGROUP_JOB_KEY = Variable[str](
    "PROCGROUP_JOB_KEY",
    _hex,
    "",
    "The job's secret, in hex; stores and data connections prove it. Set by the launcher.",
    is_secret=True,
)
PROCGROUP_JOB = _text(
    "PROCGROUP_JOB",
    "The job's name, where no launcher sets TORCHELASTIC_RUN_ID: stores refuse processes of other jobs.",
)
PROCGROUP_STORE_KEY = _text(
    "PROCGROUP_STORE_KEY",
    "The secret of the store at PROCGROUP_STORE; a process that joins there takes it as its job key. Set by spawn.",
)
PROCGROUP_TRANSPORT = Variable[str](
    "PROCGROUP_TRANSPORT", _transport, "auto", "auto, shm (fail without shared memory) or tcp (never use it)."
)
PROCGROUP_HOST_ID = _text(
    "PROCGROUP_HOST_ID",
    "Ranks with different ones share no memory, as if they ran on different hosts: for tests on one machine.",
)
PROCGROUP_NCCL_GATE = Variable[bool](
    "PROCGROUP_NCCL_GATE",
    _flag,
    True,
    "0: a call on a GPU waits on the host until all ranks have made it, before NCCL gets it",
)
PROCGROUP_WAIT_REPORT_SECONDS = Variable[float](
    "PROCGROUP_WAIT_REPORT_SECONDS",
    _seconds,
    5.0,
    "After how many seconds a rank says for whom its call waits, and once a minute from then on; 0: never.",
)
PROCGROUP_LOG = Variable[str](
    "PROCGROUP_LOG",
    _log_level,
    "",
    "The level of the logger procgroup: debug, info, warning (the default), error or off.",
)
PROCGROUP_RECORD_DIR = _text(
    "PROCGROUP_RECORD_DIR",
    "Where the flight records of the ranks are kept: a directory, or none. By default in /dev/shm, else in TMPDIR.",
)
PROCGROUP_STACK_SIGNAL = Variable[int | None](
    "PROCGROUP_STACK_SIGNAL",
    _integer,
    None,
    "The signal by which a rank writes its Python stack for others that wait for it; 0: none. By default a free one.",
)
PROCGROUP_REPLACE_GLOO = Variable[bool](
    "PROCGROUP_REPLACE_GLOO",
    _flag,
    False,
    "Let PyTorch programs that request gloo run on procgroup. Set by --replace-gloo.",
)
PROCGROUP_REPLACE_NCCL = Variable[bool](
    "PROCGROUP_REPLACE_NCCL",
    _flag,
    False,
    "Let PyTorch programs that request nccl run on procgroup, which calls NCCL. Set by --replace-nccl.",
)
PROCGROUP_RDZV_PASSWORD = _text(
    "PROCGROUP_RDZV_PASSWORD", "The password of the etcd or Redis server at which the launcher's agents meet."
)
PROCGROUP_NOTICE = Variable[int | None](
    "PROCGROUP_NOTICE", _integer, None, "The descriptor that procgroup.preempted reads. Set by the launcher."
)
TORCH_DISTRIBUTED_DEBUG = Variable[str](
    "TORCH_DISTRIBUTED_DEBUG",
    _debug_level,
    "OFF",
    "What get_debug_level returns: OFF, INFO or DETAIL. Without PROCGROUP_LOG it is the level info or debug, too.",
)
TORCHELASTIC_RUN_ID = _text("TORCHELASTIC_RUN_ID", "Set in every process that a launcher started.")
TORCHELASTIC_RESTART_COUNT = Variable[int]("TORCHELASTIC_RESTART_COUNT", _integer, 0, "How often torchrun began again.")
TORCHELASTIC_USE_AGENT_STORE = Variable[bool](
    "TORCHELASTIC_USE_AGENT_STORE",
    lambda text: text == "True",
    False,
    "True: torchrun's agent hosts a store of torch's at MASTER_ADDR:MASTER_PORT. procgroup's launchers say False.",
)
TORCHELASTIC_ERROR_FILE = _text(
    "TORCHELASTIC_ERROR_FILE", "Where a process leaves the exception that ends it; read by its launcher."
)
TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE = _text(
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "What the launcher puts before each line: ${role_name}, ${rank} and ${local_rank} are replaced; --log-prefix wins.",
)
PROCGROUP_REPORT_SOCKET = _text(
    "PROCGROUP_REPORT_SOCKET",
    "The abstract Unix socket to which procgroup.report sends a rank's progress. Set by the launcher.",
)
NO_COLOR = _text("NO_COLOR", "Anything: no colours on a terminal (no-color.org).")
TERM = _text("TERM", "The kind of terminal; dumb: one without colours and cursor movements.")
TMPDIR = Variable[str]("TMPDIR", str, "/tmp", "Where the launcher keeps temporary files.")
OMP_NUM_THREADS = _text("OMP_NUM_THREADS", "Threads per rank; by default set by the launcher.")
PYTHON_EXEC = _text("PYTHON_EXEC", "The interpreter of the ranks; the launcher's own by default.")
TORCH_ELASTIC_SHUTDOWN_TIMEOUT = _text(
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "Default of the launcher's --shutdown-timeout, in seconds."
)


def launcher_flag(flag: str) -> tuple[Variable[str], Variable[str]]:
    """Return the variables that set the default of a launcher's flag: PET_NNODES and PROCGROUP_NNODES for ``--nnodes``.

    The first, torchrun's, wins.
    """
    name = flag.removeprefix("--").replace("-", "_").upper()
    meaning = f"Default of the launcher's {flag}."
    return _text(f"PET_{name}", meaning), _text(f"PROCGROUP_{name}", meaning)
