"""The store that a launcher hosts for its ranks."""

from __future__ import annotations

import os

from procgroup.launch.nodes.job_state import WorkerStore
from procgroup.launch.nodes.reserved_port import ReservedPort
from procgroup.stores.tcp import StoreServer


class HostedStore:
    """A store server in this process, and its record, by which ranks find it.

    Its port is bound once and kept until ``close``, so no other process can take it in between. ``master`` is the
    MASTER_PORT of the ranks: a reserved port, which is kept free for a PyTorch program's own store, or the number of a
    port at which an agent listens already. Every client has to prove ``job_key``, by default 32 random bytes in hex,
    and to belong to ``job``, by default this process's own.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        master: ReservedPort | int | None = None,
        job_key: str = "",
        job: str | None = None,
    ) -> None:
        self.host = host
        self.job_key: str = job_key or os.urandom(32).hex()
        self._reserved = ReservedPort(host, 0) if master is None else master
        self.master_port: int = self._reserved if isinstance(self._reserved, int) else self._reserved.port
        try:
            self._server = StoreServer(host, 0, job_key=self.job_key, job=job)
        except BaseException:
            self._release_port()
            raise
        self.port: int = self._server.port

    def record(self) -> WorkerStore:
        """Return the address and the secret of the store, for the ranks of other nodes."""
        return WorkerStore(self.host, self.master_port, self.port, self.job_key)

    def close(self) -> None:
        """Stop serving and release the ports. Idempotent."""
        self._server.close()
        self._release_port()

    def _release_port(self) -> None:
        if isinstance(self._reserved, ReservedPort):
            self._reserved.close()
