"""The store that a launcher hosts for its ranks, and MASTER_PORT, where rank 0 of a PyTorch program hosts torch's."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from procgroup import _native
from procgroup.process import log
from procgroup.process.environ import PROCGROUP_JOB_KEY, Variable

if TYPE_CHECKING:
    from procgroup.stores.tcp import StoreServer

_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096


class WorkerStore(NamedTuple):
    """The rendezvous of a round's ranks: MASTER_ADDR and MASTER_PORT, and the store of procgroup's programs."""

    master_addr: str
    master_port: int
    port: int
    job_key: str

    def environment(self, key: Variable[str] = PROCGROUP_JOB_KEY) -> dict[str, str]:
        """Return the variables by which a rank finds it; ``key`` is the variable of the secret."""
        return {
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "PROCGROUP_MASTER": f"{self.master_addr}:{self.master_port}",
            "PROCGROUP_STORE": f"{self.master_addr}:{self.port}",
            key.name: self.job_key,
        }


class ReservedPort:
    """A TCP port of an address or host name, kept free for the ranks; 0 means any. Raises OSError if it is taken.

    Its socket is bound and never listens. So the kernel does not assign the port to a process that asks for any free
    one, but a program that names the port can bind it with SO_REUSEADDR, as torch's stores, ours and
    socket.create_server do.
    """

    def __init__(self, host: str, port: int) -> None:
        name = host.encode() if host.isascii() else host  # the codec for other names takes two milliseconds to load
        family, kind, protocol, _, address = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def share(self) -> ReservedPort:
        """Return another holder of the same port; the port is released when all holders are closed."""
        other = ReservedPort.__new__(ReservedPort)
        other._socket, other.port = self._socket.dup(), self.port
        return other

    def close(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()


class HostedStore:
    """A store server in this process, and its record, by which ranks find it.

    Its port is bound once and kept until ``close``, so no other process can take it in between. ``master`` is the
    MASTER_PORT of the ranks: a reserved port, which is kept free for a PyTorch program's own store, or the number of a
    port at which an agent listens already. Every client has to prove ``job_key``, by default 32 random bytes in hex,
    and to belong to ``job``. Without a ``job`` it is this process's own, which waits at its end for the clients.
    """

    def __init__(
        self, host: str = _LOOPBACK, master: ReservedPort | int | None = None, job_key: str = "", job: str | None = None
    ) -> None:
        self.host = host
        self.job_key: str = job_key or os.urandom(32).hex()
        self._reserved = ReservedPort(host, 0) if master is None else master
        self.master_port: int = self._reserved if isinstance(self._reserved, int) else self._reserved.port
        try:
            self._server: _native.StoreServer | StoreServer = self._serve(job)
        except BaseException:
            self._release_port()
            raise
        self.port: int = self._server.port

    def record(self) -> WorkerStore:
        """Return the address and the secret of the store, for the ranks of other nodes."""
        return WorkerStore(self.host, self.master_port, self.port, self.job_key)

    def close(self) -> None:
        """Stop serving and release the ports. Idempotent."""
        if isinstance(self._server, _native.StoreServer):
            self._server.stop()
        else:
            self._server.close()
        self._release_port()

    def _serve(self, job: str | None) -> _native.StoreServer | StoreServer:
        if job is None:
            from procgroup.stores.tcp import StoreServer

            return StoreServer(self.host, 0, job_key=self.job_key)
        # A launcher closes its store itself. So it does without StoreServer, and without ten modules of procgroup.
        log.share_with_native()
        try:
            key = bytes.fromhex(self.job_key)
        except ValueError:
            raise ValueError(
                f"expected the job key ({PROCGROUP_JOB_KEY.name}) to be hex digits, two for each byte"
            ) from None
        listener = _listen(self.host)
        port = listener.getsockname()[1]
        try:
            return _native.StoreServer(listener.detach(), job, key)
        except RuntimeError as error:
            where = f"the store at {self.host}:{port}"
            raise OSError(f"{where} cannot start its thread: {error}. Raise the limit on memory or threads.") from error

    def _release_port(self) -> None:
        if isinstance(self._reserved, ReservedPort):
            self._reserved.close()


def _listen(host: str) -> socket.socket:
    """Return a socket that listens at any free port of a host. Raises DistNetworkError."""
    if host == _LOOPBACK:
        with suppress(OSError):
            return socket.create_server((host, 0), backlog=_BACKLOG)
    from procgroup.stores.addresses import listen  # other addresses need a look at those of this host

    return listen(host, 0)
