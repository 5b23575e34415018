"""A key-value store that processes share over TCP: one of them, or the launcher, hosts its server.

The server is a native thread. A request that has to wait, waits in the server, so each request is one round trip.
Both sides prove the job's key (PROCGROUP_JOB_KEY) before any request; without a key every process that can connect may
use the store, and a warning is logged when other hosts can connect.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Self

from procgroup import _native
from procgroup.errors import DistNetworkError, DistStoreError, StoreTimeout
from procgroup.process import environ, log, state
from procgroup.process.process_end import (
    LATE_SECONDS,
    at_process_end,
    ending_exception,
    tell_late_ranks,
    wait_for_others,
)
from procgroup.stores.addresses import listen, resolve_until
from procgroup.stores.store import OnDisconnect, Store
from procgroup.types import DEFAULT_STORE_TIMEOUT, Timeout

LINGER_SECONDS = 30.0
"""The time that a process that hosts servers waits for their clients at a normal exit; see process_end, too."""

_MAX_NAMES = 8
_WITHDRAW_SECONDS = 5.0
_CONNECT_AGAIN_SECONDS = 1.0
_LATE_REQUEST_SECONDS = 0.1
_ANY_KEY = "any"
_JOINS = 2
_HOST = 4

_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()
"""Every server of this process."""

_draining: set[StoreServer] = set()
"""The servers that no store of this process refers to and that other processes still use."""


class StoreServer:
    """A store's server without a client, for a process that hosts a store for others.

    Listens on ``host`` and ``port`` (0: any free one; see ``port``), or takes over the listening socket
    ``listen_fd``. ``job_key`` is the job's secret: bytes, hex text as in PROCGROUP_JOB_KEY, "" for none, or
    None for the value of that variable; ``job`` is its name, by default TORCHELASTIC_RUN_ID. Without a secret a
    warning is logged when other hosts can connect, unless ``warns_keyless`` is False. Raises DistNetworkError when it
    cannot listen at the address.

    With ``answers_torch`` clients of ``torch.distributed.TCPStore`` (torch 2.13) can connect to the same port. Their
    keys are separate from procgroup's. Their protocol has no secret: every process that can connect reads and changes
    these keys.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        listen_fd: int | None = None,
        job_key: bytes | str | None = None,
        job: str | None = None,
        warns_keyless: bool = True,
        answers_torch: bool = False,
    ) -> None:
        log.share_with_native()
        key = _key_bytes(job_key)
        listener = listen(host, port) if listen_fd is None else _take_over(listen_fd)
        self.port: int
        address, self.port = listener.getsockname()[:2]
        # Where this process can connect to the server: for a wildcard, the loopback's addresses.
        wildcards = {"::": ["127.0.0.1", "::1"], "0.0.0.0": ["127.0.0.1"]}
        self.addresses: list[str] = wildcards.get(address, [address])
        try:
            name = _job() if job is None else job
            self._native = _native.StoreServer(listener.detach(), name, key, answers_torch)
        except RuntimeError as error:
            raise DistStoreError(
                f"the store at {host}:{self.port} cannot start its thread: {error}. "
                "Raise the limit on memory or threads."
            ) from error
        self._pid = os.getpid()
        self._users: dict[int, str] = {}
        _servers.add(self)
        at_process_end(_linger, priority=0)
        # Whether other hosts can connect without a secret.
        self.is_open_to_anybody: bool = not key and not ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if warns_keyless and self.is_open_to_anybody:
            log.warning(
                f"the store on port {self.port} listens beyond this host without a job key, so whoever can connect can "
                "read and change it. `procgroup run` sets a key; or set PROCGROUP_JOB_KEY to one secret (hex) "
                "everywhere."
            )

    @property
    def running(self) -> bool:
        """Whether the server is running."""
        return self._native.running

    @property
    def clients(self) -> int:
        """The number of client connections, without those of the store that started the server."""
        return self._native.clients

    @property
    def procgroup_clients(self) -> int:
        """The number of connections of procgroup's clients, without those of PyTorch's clients."""
        return sum(process != 0 for process, _, _ in self._native.list_clients())

    @property
    def has_clients_elsewhere(self) -> bool:
        """Whether a client of another process is connected."""
        return not all(is_own for _, _, is_own in self._native.list_clients())

    @property
    def requests(self) -> int:
        """The number of requests that the server has run."""
        return self._native.requests

    def name_users(self, users: Mapping[int, str]) -> None:
        """Name the clients, by process id, for the message about the clients for which this process waits."""
        self._users.update(users)

    def list_clients(self, *, elsewhere: bool = False) -> list[str]:
        """Return the names of the connected processes: those given to ``name_users``, or process id and host.

        With ``elsewhere`` this process is left out.
        """
        names = {}
        for process, address, is_own in self._native.list_clients():
            if is_own and elsewhere:
                continue
            name = f"process {process}" if process else "a client of PyTorch's TCPStore"
            host = address.rpartition(":")[0]
            names[process, host] = self._users.get(process, f"{name} at {host}")
        return sorted(names.values())

    def forget_torch(self) -> None:
        """Close the connections of PyTorch's clients and delete their keys, before another attempt of a job."""
        self._native.forget_torch()

    def close(self) -> None:
        """Stop the server now; its clients' calls raise StoreLost. Idempotent."""
        self._native.stop()
        _draining.discard(self)

    def release(self) -> None:
        """Stop the server when no client of another process is connected any more; at exit at the latest."""
        if self._pid != os.getpid():
            return
        self._native.drain()
        if self.clients > 0:
            _draining.add(self)
        else:
            self.close()
        for server in [server for server in _draining if not server.running]:
            server.close()


def _linger() -> None:
    """Wait at the end of the process until the clients of its servers have disconnected.

    A process that ends with an exception does not wait, except when the start of a group has failed: the other ranks
    need the store to read which rank failed and why.
    """
    if ending_exception() is not None and not state.has_failed_to_start:
        return
    waiting = [server for server in _servers if server._pid == os.getpid()]
    if not waiting:
        return
    until = time.monotonic() + LATE_SECONDS if tell_late_ranks() else 0.0
    wait_for_others(
        lambda: (
            time.monotonic() >= until and not any(server.running and server.has_clients_elsewhere for server in waiting)
        ),
        LINGER_SECONDS,
        lambda: f"this process hosts the store and waits for {_names(waiting)} to end",
        pause=0.005,
    )


def _names(servers: Sequence[StoreServer]) -> str:
    names = [name for server in servers for name in server.list_clients(elsewhere=True)]
    shown = ", ".join(names[:_MAX_NAMES])
    return shown + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


class _Hosting:
    """The stores of this process that share one server; it is released with the last of them."""

    def __init__(self, server: StoreServer) -> None:
        self.server = server
        self.release = weakref.finalize(self, server.release)
        self.release.atexit = False


class TCPStore(Store):
    """A store that processes share over TCP.

    One process gives ``is_master=True`` and hosts the server at ``port`` (0: any free one; see ``port``) or
    on the listening socket ``master_listen_fd``; a literal local address is bound alone, another name binds
    every address. The others connect, and repeat failed attempts until ``timeout``. With ``world_size`` and
    ``wait_for_workers`` the master returns when that many clients, its own included, have connected.
    ``multi_tenant`` joins the store that has the port already. ``use_libuv`` changes nothing.

    After the last store object of the hosting process is deleted, the server runs while other processes use
    it; at a normal exit the process waits up to ``LINGER_SECONDS`` for them. ``close()`` stops it at once.
    A forked child opens connections of its own.

    Raises DistNetworkError when the port is taken, no server accepts the connection, or the server is not this job's
    store; DistStoreError when not all workers connect. Later calls raise StoreLost once the server has ended.
    """

    _requests: _native.StoreClient

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_STORE_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        log.share_with_native()
        self.set_timeout(timeout)
        _check_port(port)
        self._host = host_name
        self._hosting = _host(host_name, port, master_listen_fd, multi_tenant) if is_master else None
        self._port = self._hosting.server.port if self._hosting else port
        self._uses_libuv = use_libuv
        flags = _JOINS | (_HOST if self._hosting else 0)
        self._requests = self._connect(flags)
        if is_master and wait_for_workers and world_size is not None and world_size > 0:
            joined = self._requests.wait_for_workers(world_size, self._seconds)
            if joined < world_size:
                self.close()
                raise DistStoreError(
                    f"Timed out after {self._seconds:g} seconds waiting for clients. "
                    f"{joined}/{world_size} clients joined."
                )

    @property
    def host(self) -> str:
        """The host name that was given."""
        return self._host

    @property
    def port(self) -> int:
        """The port of the server, also when 0 was given."""
        return self._port

    @property
    def libuvBackend(self) -> bool:  # noqa: N802
        """The argument ``use_libuv``, which changes nothing."""
        return self._uses_libuv

    def _connect_again(self) -> _native.StoreClient:
        """Make one more connection. Raises StoreLost where the server has ended meanwhile, which the first one shows.

        A connection that is refused would be tried again until the timeout: the server may not have begun.
        """
        deadline, within = time.monotonic() + self._seconds, _CONNECT_AGAIN_SECONDS
        while (left := deadline - time.monotonic()) > within:
            try:
                return self._connect(self._flags, within)
            except DistNetworkError:
                if deadline - time.monotonic() > left - within + 0.01:
                    raise  # before its time was up: the server refused
            with suppress(StoreTimeout):
                self.with_timeout(max(deadline - time.monotonic(), _LATE_REQUEST_SECONDS)).check([_ANY_KEY])
            within *= 2  # a busy server gets more time
        return self._connect(self._flags, left)

    @property
    def _flags(self) -> int:
        return _HOST if self._hosting else 0

    def _connect(self, flags: int, within: float | None = None) -> _native.StoreClient:
        """Connect by the store's timeout, or ``within`` a part of it, in seconds."""
        started = time.monotonic()
        addresses = self._hosting.server.addresses if self._hosting else resolve_until(self._host, self._seconds)
        if not addresses:
            raise DistNetworkError(
                f"The client socket has timed out after {round(self._seconds * 1000)}ms while trying to connect to "
                f"({self._host}, {self._port}): no address is known for this host name. Correct the name."
            )
        spent = time.monotonic() - started
        if within is not None:
            spent += max(self._seconds - within, 0.0)
        return _native.StoreClient(
            addresses, self._host, self._port, _job(), _key_bytes(None), flags, self._seconds, spent
        )

    def set_on_disconnect(self, key: str, value: str | bytes) -> OnDisconnect:
        # A separate connection: a connection that carries requests is dropped when the server does not reply in time.
        client = self._connect_again()
        client.set_on_disconnect(key, value, self._seconds)
        return _HeldConnection(client, key)

    def is_hosted_here(self) -> bool:
        return self._hosting is not None

    def name_users(self, users: Mapping[int, str]) -> None:
        if self._hosting is not None:
            self._hosting.server.name_users(users)

    def with_timeout(self, timeout: Timeout) -> Self:
        return self._view(timeout)

    def clone(self) -> TCPStore:
        clone = copy(self)
        clone._requests = self._connect(self._flags)
        return clone

    def close(self) -> None:
        """Close the connections, and stop the server if this process hosts it. Idempotent."""
        self._requests.close()
        if self._hosting is not None and self._hosting.server._pid == os.getpid():
            self._hosting.server.close()


class _HeldConnection:
    def __init__(self, client: _native.StoreClient, key: str) -> None:
        self._client = client
        self._key = key

    def withdraw(self) -> None:
        try:
            self._client.withdraw_on_disconnect(self._key, _WITHDRAW_SECONDS)
        finally:
            self.close()

    def close(self) -> None:
        self._client.close()


def _host(host: str, port: int, listen_fd: int | None, multi_tenant: bool) -> _Hosting | None:
    try:
        return _Hosting(StoreServer(host, port, listen_fd=listen_fd))
    except DistNetworkError as error:
        if multi_tenant and "EADDRINUSE" in str(error):
            return None
        raise


def _take_over(listen_fd: int) -> socket.socket:
    listener = socket.socket(fileno=listen_fd)
    if listener.type != socket.SOCK_STREAM or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.detach()
        raise ValueError(f"expected descriptor {listen_fd} to be a TCP socket that listens")
    return listener


def _job() -> str:
    return environ.TORCHELASTIC_RUN_ID.get() or environ.PROCGROUP_JOB.get()


def _key_bytes(job_key: bytes | str | None) -> bytes:
    if isinstance(job_key, bytes):
        return job_key
    text = environ.PROCGROUP_JOB_KEY.get() if job_key is None else job_key
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ValueError("expected the job key (PROCGROUP_JOB_KEY) to be hex digits, two for each byte") from None


def _check_port(port: int) -> None:
    if not isinstance(port, int) or isinstance(port, bool):
        raise TypeError(f"expected port to be int, got {type(port).__name__}")
    if not 0 <= port <= 65535:
        raise ValueError(f"expected port to be between 0 and 65535, got {port}")
