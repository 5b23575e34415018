"""The connections of one process to a Redis server, and the operations of a RedisStore as Lua scripts.

The client library's errors become procgroup's. Redis runs one script at a time, so each operation is atomic.

A job has four hashes: values by key; queues by key, as the number of the first item and the next free number; items by
number and key; barriers by name. Every change renews the expiry of the four hashes. A change that can end a wait
publishes an empty message in the channel of its key or barrier, which wakes the waiting threads.
"""

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

T = TypeVar("T")

_DEFAULT_PORT = 6379
_MAX_CONNECTIONS = 65_536
_PAUSE_SECONDS = 0.1

KEYS = ("values", "queues", "items", "barriers")
KEY_CHANNEL, BARRIER_CHANNEL = "key:", "barrier:"

_BEGINNING = """
local values, queues, items, barriers = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local milliseconds, channels, key = ARGV[1], ARGV[2], ARGV[3]
local function keep()
  for _, hash in ipairs(KEYS) do redis.call('PEXPIRE', hash, milliseconds) end
end
local function wake(kind, name) redis.call('PUBLISH', channels .. kind .. name, '') end
local function range(name)
  local first, after = string.match(redis.call('HGET', queues, name) or '0 0', '(%d+) (%d+)')
  return tonumber(first), tonumber(after)
end
"""

_BODIES = {
    "write": """
for i = 3, #ARGV, 2 do
  redis.call('HSET', values, ARGV[i], ARGV[i + 1])
  wake('key:', ARGV[i])
end
keep()
""",
    "exist": """
local found = {}
for i = 3, #ARGV do
  found[i - 2] = redis.call('HEXISTS', values, ARGV[i]) + redis.call('HEXISTS', queues, ARGV[i])
end
return found
""",
    "list": """
return {redis.call('HKEYS', values), redis.call('HKEYS', queues)}
""",
    # HINCRBY counts with 64 bits, which numbers of Lua cannot, but takes no leading zeros.
    "add": """
local text = redis.call('HGET', values, key) or '0'
local sign, digits = string.match(text, '^(-?)0*(%d+)$')
if not digits then return {'not a number'} end
redis.call('HSET', values, key, (digits == '0' and '' or sign) .. digits)
local sum = redis.pcall('HINCRBY', values, key, ARGV[4])
if type(sum) == 'table' then
  redis.call('HSET', values, key, text)
  return {string.find(sum.err, 'overflow') and 'too large' or 'not a number'}
end
keep()
wake('key:', key)
return {'sum', redis.call('HGET', values, key)}
""",
    "compare_set": """
local value = redis.call('HGET', values, key)
if (value or '') ~= ARGV[4] then return value end
redis.call('HSET', values, key, ARGV[5])
keep()
wake('key:', key)
return ARGV[5]
""",
    "append": """
local value = redis.call('HGET', values, key) or ''
if #value + #ARGV[4] > tonumber(ARGV[5]) then return #value + #ARGV[4] end
redis.call('HSET', values, key, value .. ARGV[4])
keep()
wake('key:', key)
return 0
""",
    "delete": """
local first, after = range(key)
for number = first, after - 1 do redis.call('HDEL', items, number .. ':' .. key) end
local deleted = redis.call('HDEL', queues, key) + redis.call('HDEL', values, key)
keep()
return deleted
""",
    "push": """
local first, after = range(key)
redis.call('HSET', items, after .. ':' .. key, ARGV[4])
redis.call('HSET', queues, key, first .. ' ' .. (after + 1))
keep()
wake('key:', key)
""",
    "pop": """
local first, after = range(key)
if first == after then return false end
local name = first .. ':' .. key
local value = redis.call('HGET', items, name)
redis.call('HDEL', items, name)
if first + 1 == after then
  redis.call('HDEL', queues, key)
else
  redis.call('HSET', queues, key, (first + 1) .. ' ' .. after)
end
keep()
return value
""",
    "length": """
local first, after = range(key)
return after - first
""",
    "enter_barrier": """
local caller, world_size = ARGV[4], tonumber(ARGV[5])
local cell = redis.call('HGET', barriers, key)
local barrier = cell and cjson.decode(cell) or {round = caller, world_size = world_size, callers = {}}
if barrier.world_size ~= world_size then return {'other size', tostring(barrier.world_size)} end
table.insert(barrier.callers, caller)
if #barrier.callers < world_size then
  redis.call('HSET', barriers, key, cjson.encode(barrier))
  keep()
  return {'waits', barrier.round}
end
redis.call('HDEL', barriers, key)
wake('barrier:', key)
return {'opens'}
""",
    "leave_barrier": """
local cell = redis.call('HGET', barriers, key)
local barrier = cell and cjson.decode(cell)
if not barrier or barrier.round ~= ARGV[4] then return 0 end
local others = {}
for _, caller in ipairs(barrier.callers) do
  if caller ~= ARGV[5] then table.insert(others, caller) end
end
if #others > 0 then
  barrier.callers = others
  redis.call('HSET', barriers, key, cjson.encode(barrier))
else
  redis.call('HDEL', barriers, key)
end
return 1
""",
}

SCRIPTS = {name: _BEGINNING + body for name, body in _BODIES.items()}
"""The scripts by name. Arguments: milliseconds to live, prefix of the channels, then the operation's own."""


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
