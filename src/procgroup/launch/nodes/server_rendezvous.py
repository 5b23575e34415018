"""The agents' store on an etcd or Redis server, which outlives every host of the job.

The password is read from PROCGROUP_RDZV_PASSWORD, because every user of a host can read its command lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from procgroup.environ import PROCGROUP_RDZV_PASSWORD
from procgroup.launch.deadlines import SERVER_CONNECT_SECONDS
from procgroup.launch.nodes.endpoints import parse_endpoints, parse_only_endpoint
from procgroup.stores.store import Store
from procgroup.types import Endpoint

_ETCD_PORT = 2379
_REDIS_PORT = 6379


def opener(
    backend: str, endpoint: str, conf: Mapping[str, str], run_id: str, answer_seconds: float
) -> tuple[Callable[[], Store], list[Endpoint]]:
    """Return the function that opens the store, and the servers' addresses. Raises ValueError for an invalid endpoint.

    ``answer_seconds`` is how long one request may take; ``conf`` may hold user, cacert (or ssl_cert), and for etcd
    protocol and ssl_cert_key, as with torchrun.
    """
    security = {
        "user": conf.get("user", ""),
        "password": PROCGROUP_RDZV_PASSWORD.get(),
        "ca_file": conf.get("cacert", ""),
        "cert_file": conf.get("ssl_cert", ""),
        "key_file": conf.get("ssl_cert_key", ""),
    }
    given: dict[str, Any] = {name: value for name, value in security.items() if value}
    given["answer_timeout"] = answer_seconds
    if backend == "redis":
        url = endpoint if "://" in endpoint else f"redis://{parse_only_endpoint(endpoint, _REDIS_PORT)}"
        parts = urlsplit(url)
        return partial(_open_redis, url, run_id, given), [Endpoint(parts.hostname or "", parts.port or _REDIS_PORT)]
    servers = parse_endpoints(endpoint, _ETCD_PORT)
    scheme = f"{conf['protocol']}://" if "protocol" in conf else ""
    return partial(_open_etcd, [f"{scheme}{server}" for server in servers], run_id, given), servers


def _open_redis(url: str, prefix: str, options: Mapping[str, Any]) -> Store:
    from procgroup.stores.redis import RedisStore

    return RedisStore(url, prefix, SERVER_CONNECT_SECONDS, **options)


def _open_etcd(servers: list[str], prefix: str, options: Mapping[str, Any]) -> Store:
    from procgroup.stores.etcd import EtcdStore

    return EtcdStore(servers, prefix, SERVER_CONNECT_SECONDS, **options)
