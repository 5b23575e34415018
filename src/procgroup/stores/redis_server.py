"""The connections of one process to a Redis server; the client library's errors become procgroup's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from procgroup.errors import DistNetworkError, DistStoreError, StoreLost
from procgroup.stores.addresses import resolve
from procgroup.stores.redis_scripts import KEYS, SCRIPTS

T = TypeVar("T")

_DEFAULT_PORT = 6379
_MAX_CONNECTIONS = 65_536
_PAUSE_SECONDS = 0.1


def _library() -> Any:
    try:
        import redis
    except ImportError as error:
        raise ImportError("RedisStore needs the client library of Redis. Install it with: pip install redis") from error
    return redis


class RedisServer:
    """A job's keys on a server, and the connections of this process to it."""

    def __init__(
        self, url: str, prefix: str, time_to_live: float, options: Mapping[str, Any], answer_seconds: float
    ) -> None:
        self._redis = _library()
        self._url, self._options = url, options
        self._time_to_live = round(time_to_live * 1000)
        self._answer_seconds = answer_seconds
        self._namespace = f"procgroup:{quote(prefix, safe='')}:"
        self.hashes: dict[str, str] = {key: self._namespace + key for key in KEYS}
        address = urlsplit(url)
        self.host: str = address.hostname or "localhost"
        self.port: int = address.port or _DEFAULT_PORT
        self._closed = False
        self._use_new_connections()

    def _use_new_connections(self) -> None:
        self._process = os.getpid()
        self._client = self._new_client(self._answer_seconds)
        self._scripts = {name: self._client.register_script(text) for name, text in SCRIPTS.items()}

    def _new_client(self, timeout: float) -> Any:
        # The library must not repeat requests: a script whose answer was lost could be executed twice.
        retry = self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0)
        timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "max_connections": _MAX_CONNECTIONS}
        pool = self._redis.ConnectionPool.from_url(self._url, retry=retry, protocol=2, **timeouts, **self._options)
        return self._redis.Redis(connection_pool=pool)

    def client(self) -> Any:
        """Return the library's client; a forked child gets a new one. Raises DistStoreError when closed."""
        if self._closed:
            raise DistStoreError(f"this RedisStore ({self.host}:{self.port}) was closed")
        if self._process != os.getpid():
            self._use_new_connections()
        return self._client

    def change(self, script: str, *arguments: object) -> Any:
        """Run a script once. Whether it has run is unknown when its answer is lost."""
        with self.translated_errors():
            self.client()
            return self._scripts[script](
                keys=list(self.hashes.values()), args=[self._time_to_live, self._namespace, *arguments]
            )

    def repeat(self, script: str, *arguments: object) -> Any:
        """Run a script that may run twice; repeat it for a while when the server is lost, as during a restart."""
        return self.keep_trying(lambda: self.change(script, *arguments))

    def keep_trying(self, request: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._answer_seconds - _PAUSE_SECONDS
        while True:
            try:
                with self.translated_errors():
                    return request()
            except StoreLost:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_SECONDS)

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

    def connect(self, timeout: float) -> None:
        """Make the first connection. Raises DistNetworkError."""
        if not resolve(self.host, timeout):
            raise self._unreachable("no address is known for this host name")
        try:
            with self.translated_errors(), closing(self._new_client(timeout)) as client:
                client.ping()
        except StoreLost as error:
            raise self._unreachable(error.reason) from error

    def _unreachable(self, reason: str) -> DistNetworkError:
        return DistNetworkError(
            f"cannot connect to the Redis server at {self.host}:{self.port}: {reason.rstrip('.')}. "
            "Start the server, or correct the URL."
        )

    @contextmanager
    def subscribed(self, channels: Sequence[str]) -> Iterator[Subscription]:
        """Subscribe to channels of the job from now on, on a connection of its own."""
        subscription = self.keep_trying(lambda: self._subscribe(channels))
        try:
            yield Subscription(subscription, self._redis.exceptions.RedisError)
        finally:
            subscription.close()

    def _subscribe(self, channels: Sequence[str]) -> Any:
        subscription = self.client().pubsub()
        try:
            subscription.subscribe(*(self._namespace + channel for channel in channels))
            for _ in channels:
                if subscription.get_message(timeout=self._answer_seconds) is None:
                    raise self._lost("no answer in time")
        except BaseException:
            subscription.close()
            raise
        return subscription

    def clone(self) -> RedisServer:
        self.client()
        clone = copy(self)
        clone._use_new_connections()
        return clone

    def close(self) -> None:
        self._closed = True
        if self._process == os.getpid():
            self._client.connection_pool.disconnect(inuse_connections=False)


class Subscription:
    """A connection that receives the messages of some channels."""

    def __init__(self, subscription: Any, error: type[Exception]) -> None:
        self._subscription = subscription
        self._error = error

    def wait(self, timeout: float) -> None:
        try:
            self._subscription.get_message(timeout=timeout)
        except self._error:
            time.sleep(min(timeout, _PAUSE_SECONDS))  # the next read reports the server's error
