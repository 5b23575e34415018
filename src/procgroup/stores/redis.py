"""A store on a Redis server, which outlives the hosts of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from urllib.parse import urlsplit

from procgroup.errors import StoreLimitError
from procgroup.stores.database import (
    ANSWER_SECONDS,
    DEFAULT_TIME_TO_LIVE,
    AwaitedKeys,
    DatabaseStore,
    checked_answer_timeout,
    checked_prefix,
    checked_time_to_live,
)
from procgroup.stores.redis_server import BARRIER_CHANNEL, KEY_CHANNEL, RedisServer, Subscription
from procgroup.stores.store import checked_key, not_a_number, other_world_size, sum_too_large
from procgroup.types import DEFAULT_STORE_TIMEOUT, Timeout

MAX_VALUE_BYTES = 512 << 20
"""Redis's own limit (proto-max-bulk-len)."""


class RedisStore(DatabaseStore):
    """A store on a Redis server (6.0 or later, also Valkey), for any number of jobs at a time.

    ``url`` is ``redis://[[user]:password@]host[:port][/database]``, or ``rediss://`` for TLS; ``user`` and
    ``password`` may be given apart, ``ca_file``, ``cert_file`` and ``key_file`` are paths of PEM files for TLS.
    ``prefix`` names the job: stores with the same prefix share their keys. Redis removes a job's keys
    ``time_to_live`` after the last change of one of them, ``delete_all`` removes them at once.

    A value may have 512 MiB. The store does not notice that a process ends (``set_on_disconnect`` returns
    None), and one that is killed inside of a barrier stays counted there. A forked child connects anew by itself.

    ``answer_timeout`` (initially 5 s) is how long the server may take to answer one request.

    Raises DistNetworkError when the server cannot be reached; later calls raise StoreLost within twice
    ``answer_timeout`` once the server is lost, and DistStoreError with the server's text when it refuses a request.
    """

    _max_value_bytes = MAX_VALUE_BYTES

    def __init__(
        self,
        url: str,
        prefix: str,
        timeout: Timeout = DEFAULT_STORE_TIMEOUT,
        *,
        time_to_live: Timeout = DEFAULT_TIME_TO_LIVE,
        user: str | None = None,
        password: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        cert_file: str | os.PathLike[str] | None = None,
        key_file: str | os.PathLike[str] | None = None,
        answer_timeout: Timeout = ANSWER_SECONDS,
    ) -> None:
        self.set_timeout(timeout)
        files = {"ssl_ca_certs": ca_file, "ssl_certfile": cert_file, "ssl_keyfile": key_file}
        options = {
            "username": user,
            "password": password,
            **{name: os.fspath(path) for name, path in files.items() if path is not None},
        }
        _check_url(url, uses_files=any(files.values()))
        life, answer_seconds = checked_time_to_live(time_to_live), checked_answer_timeout(answer_timeout)
        self._server = RedisServer(url, checked_prefix(prefix), life, options, answer_seconds)
        self._server.connect(min(self._seconds, ANSWER_SECONDS))

    @property
    def host(self) -> str:
        """The host name of the server."""
        return self._server.host

    @property
    def port(self) -> int:
        """The port of the server."""
        return self._server.port

    def _write(self, pairs: Mapping[str, bytes]) -> None:
        self._server.repeat("write", *(part for pair in pairs.items() for part in pair))

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        values: list[bytes | None] = self._server.keep_trying(
            lambda: self._server.client().hmget(self._server.hashes["values"], keys)
        )
        return values

    def _exist(self, keys: Sequence[str]) -> list[bool]:
        return [found > 0 for found in self._server.repeat("exist", *keys)]

    def _add(self, key: str, amount: int) -> int:
        outcome, *total = self._server.change("add", key, amount)
        if outcome == b"sum":
            return int(total[0])
        raise sum_too_large(key) if outcome == b"too large" else not_a_number(key)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes | None:
        value: bytes | None = self._server.change("compare_set", key, expected, desired)
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._server.change("delete", checked_key(key)))

    def list_keys(self, prefix: str = "") -> list[str]:
        start = checked_key(prefix).encode()
        values, queues = self._server.repeat("list")
        return sorted(key.decode() for key in {*values, *queues} if key.startswith(start))

    def _append(self, key: str, tail: bytes) -> None:
        excess = self._server.change("append", key, tail, MAX_VALUE_BYTES)
        if excess:
            raise StoreLimitError(what="a value", size=excess, limit=MAX_VALUE_BYTES)

    def _push(self, key: str, value: bytes) -> None:
        self._server.change("push", key, value)

    def _pop(self, key: str) -> bytes | None:
        value: bytes | None = self._server.change("pop", key)
        return value

    def queue_len(self, key: str) -> int:
        return int(self._server.repeat("length", checked_key(key)))

    def _enter_barrier(self, key: str, world_size: int, caller: str) -> str | None:
        outcome, *detail = self._server.change("enter_barrier", key, caller, world_size)
        if outcome == b"other size":
            raise other_world_size(key, int(detail[0]), world_size)
        return detail[0].decode() if outcome == b"waits" else None

    def _leave_barrier(self, key: str, round_: str, caller: str) -> bool:
        return bool(self._server.repeat("leave_barrier", key, round_, caller))

    def _read_barrier(self, key: str) -> bytes | None:
        cell: bytes | None = self._server.keep_trying(
            lambda: self._server.client().hget(self._server.hashes["barriers"], key)
        )
        return cell

    def _watch(self, awaited: AwaitedKeys) -> AbstractContextManager[Subscription]:
        kind = BARRIER_CHANNEL if awaited.barriers else KEY_CHANNEL
        return self._server.subscribed([kind + key for key in dict.fromkeys(awaited.keys)])

    def delete_all(self) -> None:
        self._server.keep_trying(lambda: self._server.client().unlink(*self._server.hashes.values()))

    def clone(self) -> RedisStore:
        clone = copy(self)
        clone._server = self._server.clone()
        return clone

    def close(self) -> None:
        self._server.close()


def _check_url(url: str, *, uses_files: bool) -> None:
    scheme = urlsplit(url).scheme
    if scheme not in ("redis", "rediss"):
        raise ValueError(f"expected a URL such as redis://host:6379/0 or rediss://host:6379/0, got scheme {scheme!r}")
    if uses_files and scheme != "rediss":
        raise ValueError("files for TLS were given with a URL without TLS: write rediss:// instead of redis://")
