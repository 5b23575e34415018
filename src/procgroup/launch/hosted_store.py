"""The store that a launcher hosts for its ranks."""

from __future__ import annotations

import os
from types import TracebackType

from procgroup.environ import PROCGROUP_JOB_KEY, Variable
from procgroup.launch.reserved_port import ReservedPort
from procgroup.stores.tcp import StoreServer


class HostedStore:
    """A store server in this process, and what a rank needs to reach it.

    Its port is bound once and kept until ``close``: no other process can take it between the choice and
    the use. So is ``master_port``, which is left to the program: a PyTorch program's rank 0 hosts its own store there,
    and cannot speak with this one. Every client has to prove ``job_key``, by default 32 random bytes in hex, and to be
    of ``job``, by default the one that this process is in itself.
    """

    def __init__(
        self, host: str = "127.0.0.1", master_port: int = 0, job_key: str = "", job: str | None = None
    ) -> None:
        self.host = host
        self.job_key: str = job_key or os.urandom(32).hex()
        self._master_port = ReservedPort(host, master_port)
        try:
            self._server = StoreServer(host, 0, job_key=self.job_key, job=job)
        except BaseException:
            self._master_port.close()
            raise
        self.port: int = self._server.port

    def environment(self, key: Variable[str] = PROCGROUP_JOB_KEY) -> dict[str, str]:
        """Return the variables that lead a rank to this store; ``key`` is the one that holds the secret."""
        return {
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self._master_port.port),
            "PROCGROUP_MASTER": f"{self.host}:{self._master_port.port}",
            "PROCGROUP_STORE": f"{self.host}:{self.port}",
            key.name: self.job_key,
        }

    def close(self) -> None:
        """Stop serving and give the ports back. Idempotent."""
        self._server.close()
        self._master_port.close()

    def __enter__(self) -> HostedStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
