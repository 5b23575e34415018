"""The store on a Redis server, for jobs whose store has to survive the hosts that they run on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from typing import Any
from urllib.parse import quote, urlsplit

from procgroup.errors import DistNetworkError, DistStoreError, StoreLimitError, StoreLost
from procgroup.stores.addresses import resolve
from procgroup.stores.database import (
    ANSWER_SECONDS,
    DEFAULT_TIME_TO_LIVE,
    Awaited,
    DatabaseStore,
    checked_prefix,
    checked_time_to_live,
)
from procgroup.stores.redis_scripts import BARRIER_CHANNEL, KEY_CHANNEL, KEYS, SCRIPTS
from procgroup.stores.store import checked_key, not_a_number, other_world_size, sum_too_large
from procgroup.types import DEFAULT_STORE_TIMEOUT, Timeout

MAX_VALUE_BYTES = 512 << 20
"""Redis's own limit (proto-max-bulk-len)."""

_DEFAULT_PORT = 6379
_MAX_CONNECTIONS = 65_536
_PAUSE_SECONDS = 0.1


def _library() -> Any:
    try:
        import redis
    except ImportError as error:
        raise ImportError(
            "RedisStore needs the client library of Redis. Install it with: pip install procgroup[redis]"
        ) from error
    return redis


class _Server:
    """A job's keys on a server, and the connections of this process to it."""

    def __init__(self, url: str, prefix: str, time_to_live: float, options: Mapping[str, Any]) -> None:
        self._redis = _library()
        self._url, self._options = url, options
        self._time_to_live = round(time_to_live * 1000)
        self._namespace = f"procgroup:{quote(prefix, safe='')}:"
        self.keys = [self._namespace + key for key in KEYS]
        address = urlsplit(url)
        self.host, self.port = address.hostname or "localhost", address.port or _DEFAULT_PORT
        self._closed = False
        self._use_new_connections()

    def _use_new_connections(self) -> None:
        self._process = os.getpid()
        self._client = self._new_client(ANSWER_SECONDS)
        self._scripts = {name: self._client.register_script(text) for name, text in SCRIPTS.items()}

    def _new_client(self, limit: float) -> Any:
        # A script that is sent again after a lost answer could count twice, so nothing is repeated by the library.
        retry = self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0)
        limits = {"socket_timeout": limit, "socket_connect_timeout": limit, "max_connections": _MAX_CONNECTIONS}
        pool = self._redis.ConnectionPool.from_url(self._url, retry=retry, protocol=2, **limits, **self._options)
        return self._redis.Redis(connection_pool=pool)

    def client(self) -> Any:
        """Return the library's client, in a forked child a new one. Raises DistStoreError when closed."""
        if self._closed:
            raise DistStoreError(f"this RedisStore ({self.host}:{self.port}) was closed")
        if self._process != os.getpid():
            self._use_new_connections()
        return self._client

    def run(self, script: str, *arguments: object) -> Any:
        with self.translated_errors():
            self.client()
            return self._scripts[script](keys=self.keys, args=[self._time_to_live, self._namespace, *arguments])

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        errors = self._redis.exceptions
        try:
            yield
        except (errors.AuthenticationError, errors.AuthorizationError) as error:
            raise self._refusal(error) from error
        except errors.TimeoutError as error:
            raise self._lost("no answer in time") from error
        except errors.ConnectionError as error:
            raise self._lost(str(error)) from error
        except errors.RedisError as error:
            raise self._refusal(error) from error

    def _lost(self, reason: str) -> StoreLost:
        return StoreLost(host=self.host, port=self.port, reason=reason.rstrip("."))

    def _refusal(self, error: Exception) -> DistStoreError:
        return DistStoreError(f"the Redis server at {self.host}:{self.port} refuses: {error}")

    def connect(self, limit: float) -> None:
        """Make the first connection. Raises DistNetworkError."""
        if not resolve(self.host, limit):
            raise self._unreachable("no address is known for this host name")
        try:
            with self.translated_errors(), closing(self._new_client(limit)) as client:
                client.ping()
        except StoreLost as error:
            raise self._unreachable(error.reason) from error

    def _unreachable(self, reason: str) -> DistNetworkError:
        return DistNetworkError(
            f"cannot connect to the Redis server at {self.host}:{self.port}: {reason.rstrip('.')}. "
            "Start the server, or correct the URL."
        )

    @contextmanager
    def subscribed(self, names: Sequence[str]) -> Iterator[_Subscription]:
        with self.translated_errors():
            subscription = self.client().pubsub()
        try:
            with self.translated_errors():
                subscription.subscribe(*(self._namespace + name for name in names))
                for _ in names:
                    if subscription.get_message(timeout=ANSWER_SECONDS) is None:
                        raise self._lost("no answer in time")
            yield _Subscription(subscription, self._redis.exceptions.RedisError)
        finally:
            subscription.close()

    def clone(self) -> _Server:
        self.client()
        clone = copy(self)
        clone._use_new_connections()
        return clone

    def close(self) -> None:
        self._closed = True
        if self._process == os.getpid():
            self._client.connection_pool.disconnect(inuse_connections=False)


class _Subscription:
    """A connection that receives what is published in some channels."""

    def __init__(self, subscription: Any, error: type[Exception]) -> None:
        self._subscription = subscription
        self._error = error

    def wait(self, limit: float) -> None:
        try:
            self._subscription.get_message(timeout=limit)
        except self._error:
            time.sleep(min(limit, _PAUSE_SECONDS))  # the read that follows says what is wrong with the server


class RedisStore(DatabaseStore):
    """A store on a Redis server (6.0 or later, also Valkey), for any number of jobs at a time.

    ``url`` is ``redis://[[user]:password@]host[:port][/database]``, or ``rediss://`` for TLS; ``user`` and
    ``password`` may be given apart, ``ca_file``, ``cert_file`` and ``key_file`` are paths of PEM files for TLS.
    ``prefix`` names the job: stores with the same prefix share their keys. Redis removes a job's keys
    ``time_to_live`` after the last change of one of them, ``delete_all`` removes them at once.

    A value may have 512 MiB. The store does not notice that a process ends (``set_on_disconnect`` returns
    None), and one that is killed inside of a barrier stays counted there. A forked child connects anew by itself.

    Raises DistNetworkError when the server cannot be reached; later calls raise StoreLost within 10 s once
    the server is gone, and DistStoreError with the server's words when it refuses a request.
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
    ) -> None:
        self.set_timeout(timeout)
        files = {"ssl_ca_certs": ca_file, "ssl_certfile": cert_file, "ssl_keyfile": key_file}
        options = {
            "username": user,
            "password": password,
            **{name: os.fspath(path) for name, path in files.items() if path is not None},
        }
        _check_url(url, uses_files=any(files.values()))
        self._server = _Server(url, checked_prefix(prefix), checked_time_to_live(time_to_live), options)
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
        self._server.run("write", *(part for pair in pairs.items() for part in pair))

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        with self._server.translated_errors():
            values: list[bytes | None] = self._server.client().hmget(self._server.keys[0], keys)
            return values

    def _exist(self, keys: Sequence[str]) -> list[bool]:
        return [found > 0 for found in self._server.run("exist", *keys)]

    def _add(self, key: str, amount: int) -> int:
        outcome, *total = self._server.run("add", key, amount)
        if outcome == b"sum":
            return int(total[0])
        raise sum_too_large(key) if outcome == b"too large" else not_a_number(key)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes | None:
        value: bytes | None = self._server.run("compare_set", key, expected, desired)
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._server.run("delete", checked_key(key)))

    def list_keys(self, prefix: str = "") -> list[str]:
        start = checked_key(prefix).encode()
        values, queues = self._server.run("list")
        return sorted(key.decode() for key in {*values, *queues} if key.startswith(start))

    def _append(self, key: str, tail: bytes) -> None:
        excess = self._server.run("append", key, tail, MAX_VALUE_BYTES)
        if excess:
            raise StoreLimitError(what="a value", size=excess, limit=MAX_VALUE_BYTES)

    def _push(self, key: str, value: bytes) -> None:
        self._server.run("push", key, value)

    def _pop(self, key: str) -> bytes | None:
        value: bytes | None = self._server.run("pop", key)
        return value

    def queue_len(self, key: str) -> int:
        return int(self._server.run("length", checked_key(key)))

    def _enter_barrier(self, key: str, world_size: int, caller: str) -> str | None:
        outcome, *detail = self._server.run("enter_barrier", key, caller, world_size)
        if outcome == b"other size":
            raise other_world_size(key, int(detail[0]), world_size)
        return detail[0].decode() if outcome == b"waits" else None

    def _leave_barrier(self, key: str, round_: str, caller: str) -> bool:
        return bool(self._server.run("leave_barrier", key, round_, caller))

    def _read_barrier(self, key: str) -> bytes | None:
        with self._server.translated_errors():
            cell: bytes | None = self._server.client().hget(self._server.keys[3], key)
            return cell

    @contextmanager
    def _watch(self, awaited: Awaited) -> Iterator[_Subscription]:
        kind = BARRIER_CHANNEL if awaited.barriers else KEY_CHANNEL
        with self._server.subscribed([kind + key for key in dict.fromkeys(awaited.keys)]) as subscription:
            yield subscription

    def delete_all(self) -> None:
        with self._server.translated_errors():
            self._server.client().unlink(*self._server.keys)

    def clone(self) -> RedisStore:
        clone = RedisStore.__new__(RedisStore)
        clone._seconds = self._seconds
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
