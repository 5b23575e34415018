"""Send requests to etcd's JSON gateway at one of several endpoints, and fail over to the next one.

Every etcd server has the gateway from 3.4 on, so a client needs HTTP and JSON of the standard library only
(docs/design/decisions/0026 compares the client libraries). A request that was not sent, or that may be repeated, goes
to the next endpoint. A change whose answer was lost is not repeated, because it could be executed twice.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import ssl
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from procgroup.errors import DistStoreError, Refusal, StoreLost
from procgroup.stores.addresses import resolve
from procgroup.types import Endpoint

T = TypeVar("T")

_MAX_IDLE = 8
_PAUSE_SECONDS = 0.1
# The least that one endpoint gets of a request's time: several of them must not make it too short for a slow disk.
_LEAST_SHARE_SECONDS = 0.5
_UNAVAILABLE, _UNAUTHENTICATED = 14, 16
_AUTHENTICATE = "/v3/auth/authenticate"
_OUTDATED_TOKEN = "revision of auth store is old"
_NOT_PROPOSED = "etcdserver: no leader"


class _NotSentError(Exception):
    """The endpoint did not receive the request."""


class _NoAnswerError(Exception):
    """The endpoint may have executed the request."""


class EtcdGateway:
    """The connections of one process to the members of an etcd cluster. May be used from several threads."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        tls: ssl.SSLContext | None,
        user: str | None,
        password: str | None,
        answer_seconds: float,
    ) -> None:
        self._endpoints = list(endpoints)
        self._tls = tls
        self._credentials = None if user is None else {"name": user, "password": password or ""}
        self._answer_seconds = answer_seconds
        self._token = ""
        self._preferred = 0
        self._closed = False
        self._process = os.getpid()
        # Used by list.pop and list.append only, which are atomic: another thread could fork while a lock is held.
        self._idle: list[tuple[Endpoint, http.client.HTTPConnection]] = []
        weakref.finalize(self, _close_all, self._idle)

    def __str__(self) -> str:
        return ", ".join(map(str, self._endpoints))

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that gets the next request."""
        return self._endpoints[self._preferred % len(self._endpoints)]

    @property
    def can_fail_over(self) -> bool:
        """Whether there is another endpoint than the one that gets the next request."""
        return len(self._endpoints) > 1

    def call(self, path: str, body: Mapping[str, object], *, repeatable: bool, timeout: float | None = None) -> Any:
        """Return the decoded answer to a request. Raises Refusal, StoreLost, or DistStoreError when closed."""
        data = json.dumps(body).encode()
        seconds = self._answer_seconds if timeout is None else timeout
        return self._try_endpoints(lambda endpoint, left: self._post(endpoint, path, data, left), repeatable, seconds)

    @contextmanager
    def watch(self, requests: Sequence[Mapping[str, object]]) -> Iterator[EtcdWatch]:
        """Open a watch for etcd's watch requests, from now on, on a connection of its own."""
        data = "".join(json.dumps({"create_request": request}) for request in requests).encode()
        connection, response = self._try_endpoints(
            lambda endpoint, left: self._open_watch(endpoint, data, len(requests), left), True, self._answer_seconds
        )
        try:
            yield EtcdWatch(connection, response)
        finally:
            response.close()
            connection.close()

    def close(self) -> None:
        self._closed = True
        _close_all(self._idle)

    def clone(self) -> EtcdGateway:
        self._check_usable()
        clone = EtcdGateway(self._endpoints, self._tls, None, None, self._answer_seconds)
        clone._credentials, clone._token, clone._preferred = self._credentials, self._token, self._preferred
        return clone

    def _try_endpoints(self, action: Callable[[Endpoint, float], T], repeatable: bool, timeout: float) -> T:
        """Run an action at one endpoint after another, until one answers."""
        deadline = time.monotonic() + timeout
        untried = len(self._endpoints)
        while True:
            self._check_usable()
            endpoint = self.endpoint
            left = deadline - time.monotonic()
            share = max(left / untried, min(left, _LEAST_SHARE_SECONDS), 0.001)
            try:
                return self._authenticated(action, endpoint, share)
            except (_NotSentError, _NoAnswerError) as failure:
                if self.endpoint == endpoint:
                    self._preferred += 1
                is_safe = repeatable or isinstance(failure, _NotSentError)
                reason = str(failure) + ("" if is_safe else "; whether the change was made is not known")
                if not is_safe or time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise StoreLost(host=endpoint.host, port=endpoint.port, reason=reason) from failure
            if untried == 1:
                time.sleep(_PAUSE_SECONDS)
            untried = max(untried - 1, 1)

    def _authenticated(self, action: Callable[[Endpoint, float], T], endpoint: Endpoint, timeout: float) -> T:
        """Run an action with a token; repeat it with a new token when etcd no longer accepts the old one."""
        if self._credentials and not self._token:
            self._authenticate(endpoint, timeout)
        try:
            return action(endpoint, timeout)
        except Refusal as refusal:
            is_outdated = refusal.code == _UNAUTHENTICATED or _OUTDATED_TOKEN in refusal.text
            if not (self._credentials and is_outdated):
                raise
        self._authenticate(endpoint, timeout)
        return action(endpoint, timeout)

    def _authenticate(self, endpoint: Endpoint, timeout: float) -> None:
        self._token = self._post(endpoint, _AUTHENTICATE, json.dumps(self._credentials).encode(), timeout)["token"]

    def _post(self, endpoint: Endpoint, path: str, data: bytes, timeout: float) -> Any:
        connection = self._take_idle(endpoint, timeout) or self._connect(endpoint, timeout)
        with _closing_on_error(connection, timeout):
            response = self._send(connection, path, data)
            content = response.read()
        self._keep(endpoint, connection)
        return _decoded(endpoint, response.status, content)

    def _keep(self, endpoint: Endpoint, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for the next request, unless it is closed, this gateway is closed, or enough are kept."""
        if connection.sock is None or self._closed or len(self._idle) >= _MAX_IDLE:
            connection.close()
        else:
            self._idle.append((endpoint, connection))

    def _send(self, connection: http.client.HTTPConnection, path: str, data: bytes) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._token and path != _AUTHENTICATE:
            headers["Authorization"] = self._token
        connection.request("POST", path, data, headers)
        return connection.getresponse()

    def _open_watch(
        self, endpoint: Endpoint, data: bytes, confirmations: int, timeout: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connect(endpoint, timeout)
        with _closing_on_error(connection, timeout):
            response = self._send(connection, "/v3/watch", data)
            for _ in range(confirmations):
                answer = _decoded(endpoint, response.status, response.readline())
                if answer["result"].get("canceled"):
                    raise Refusal(endpoint, 0, answer["result"].get("cancel_reason", "the watch was cancelled"))
        return connection, response

    def _connect(self, endpoint: Endpoint, timeout: float) -> http.client.HTTPConnection:
        try:
            connected = _connect_socket(endpoint, self._tls, timeout)
        except OSError as error:
            raise _NotSentError(_reason(error, timeout)) from error
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port)
        connection.auto_open = 0
        connection.sock = connected
        return connection

    def _take_idle(self, endpoint: Endpoint, timeout: float) -> http.client.HTTPConnection | None:
        """Return an idle connection to the endpoint; None where there is none that is open."""
        while self._idle:
            try:
                owner, connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if owner == endpoint:
                poll = select.poll()
                poll.register(connection.sock, select.POLLIN)
                if not poll.poll(0):  # an idle connection is readable once its other end is closed
                    connection.sock.settimeout(timeout)
                    return connection
            connection.close()
        return None

    def _check_usable(self) -> None:
        if self._closed:
            raise DistStoreError(f"this EtcdStore ({self}) was closed")
        if self._process != os.getpid():
            self._process = os.getpid()
            _close_all(self._idle)  # a forked child has copies of the parent's connections


class EtcdWatch:
    """A watch that etcd has confirmed."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._socket = connection.sock
        self._response = response

    def wait(self, timeout: float) -> None:
        """Sleep until etcd reports a change or ends the watch, at most ``timeout`` seconds."""
        try:
            self._socket.settimeout(max(timeout, 0.001))
            if self._response.readline():
                return
        except TimeoutError:
            return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(min(timeout, _PAUSE_SECONDS))  # the next read reports the server's error


@contextmanager
def _closing_on_error(connection: http.client.HTTPConnection, timeout: float) -> Iterator[None]:
    """Close a connection after an error within the block; an error of the connection becomes _NoAnswerError."""
    try:
        yield
    except BaseException as error:
        connection.close()
        if isinstance(error, (OSError, http.client.HTTPException)):
            raise _NoAnswerError(_reason(error, timeout)) from error
        raise


def _close_all(connections: list[tuple[Endpoint, http.client.HTTPConnection]]) -> None:
    with suppress(IndexError):
        while True:
            connections.pop()[1].close()


def _connect_socket(endpoint: Endpoint, tls: ssl.SSLContext | None, timeout: float) -> socket.socket:
    addresses = resolve(endpoint.host, timeout)
    error = OSError("no address is known for this host name")
    for address in addresses:
        try:
            connected = socket.create_connection((address, endpoint.port), timeout / len(addresses))
        except OSError as failure:
            error = failure
            continue
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(timeout)
        return tls.wrap_socket(connected, server_hostname=endpoint.host) if tls else connected
    raise error


def _reason(error: Exception, timeout: float) -> str:
    return f"no answer within {timeout:.3g} s" if isinstance(error, TimeoutError) else str(error) or repr(error)


def _decoded(endpoint: Endpoint, status: int, content: bytes) -> Any:
    """Decode an answer. Raises Refusal for an error of etcd, DistStoreError for an answer of another program."""
    try:
        answer = json.loads(content)
        if "error" not in answer and status == http.client.OK:
            return answer
        error = answer["error"] if isinstance(answer.get("error"), dict) else answer
        code, text = int(error.get("grpc_code", error.get("code"))), str(error["message"])
    except (ValueError, TypeError, KeyError, AttributeError) as failure:
        raise DistStoreError(
            f"expected the JSON gateway of etcd 3.4 or later at {endpoint}, got an answer with HTTP status {status}, "
            f"{content[:80]!r}. Correct the endpoint, or enable etcd's gRPC gateway."
        ) from failure
    if _NOT_PROPOSED in text:
        raise _NotSentError(text)
    if code == _UNAVAILABLE:
        raise _NoAnswerError(text)
    raise Refusal(endpoint, code, text)
