"""Read the values of the launcher's flags from text. Each function raises ValueError for an unusable text."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from procgroup.cluster.accelerators import visible_gpus
from procgroup.cluster.cores import usable_cores


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
START_METHODS = ("spawn", "fork", "forkserver")
BINDINGS = ("node", "socket", "exclusive", "core-complex", "cores")

# Keys of torchrun, with the same meaning. The last three belong to back-ends that do not exist here: without effect.
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
        raise ValueError(f"GPU {twice} stands twice in {value!r}")
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
    """Read names of signals; signals that no process can handle are refused."""
    chosen: list[signal.Signals] = []
    for name in filter(None, (part.strip() for part in value.split(","))):
        found = getattr(signal, name, None)
        if not isinstance(found, signal.Signals):
            raise ValueError(f"expected names of signals such as SIGTERM,SIGINT, got {name!r}")
        if found in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise ValueError(f"{name} cannot be forwarded to the ranks")
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
            seconds(said)
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
