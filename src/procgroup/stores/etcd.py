"""A store on an etcd cluster, which outlives the hosts of a job.

A job's keys begin with ``procgroup/PREFIX/``: the value of a key at ``k/KEY/v``, each item of its queue at
``k/KEY/q/ITEM``, a barrier at ``b/KEY``; PREFIX and KEY are quoted as in a URL, so that they have no slash. One
range covers a key's value and queue. A queue is ordered by the revisions at which its items were created. A change that
depends on the present value is a transaction, which fails after a concurrent change and is then repeated.
"""

from __future__ import annotations

import os
import ssl
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from urllib.parse import quote, unquote, urlsplit

from procgroup.errors import DistNetworkError, DistStoreError, Refusal, StoreLost
from procgroup.stores.database import (
    ANSWER_SECONDS,
    DEFAULT_TIME_TO_LIVE,
    AwaitedKeys,
    Barrier,
    DatabaseStore,
    checked_answer_timeout,
    checked_prefix,
    checked_time_to_live,
)
from procgroup.stores.etcd_gateway import EtcdGateway, EtcdWatch
from procgroup.stores.etcd_keys import EtcdKeys, KeyRange
from procgroup.stores.store import checked_key, other_world_size, sum_of
from procgroup.types import DEFAULT_STORE_TIMEOUT, Endpoint, Timeout

MAX_REQUEST_BYTES = 1_572_864
"""What an etcd server takes in one request, unless it was started with another --max-request-bytes: 1.5 MiB."""

_DEFAULT_PORT = 2379
_BYTES_BESIDE_VALUE = 4096


class EtcdStore(DatabaseStore):
    """A store on an etcd cluster (3.4 or later), for any number of jobs at a time.

    ``endpoints`` are "host:port" or URLs (``https://`` for TLS) of members of the cluster, as a list or with commas
    between them; when one cannot be reached, the next one is used. ``user`` and ``password`` are needed where etcd's
    authentication is on, ``ca_file``, ``cert_file`` and ``key_file`` are paths of PEM files for TLS. ``prefix``
    names the job: stores with the same prefix share their keys. etcd removes a job's keys ``time_to_live``
    after the last change of one of them (give or take a tenth of it), ``delete_all`` removes them at once.

    A key and its value share ``max_request_bytes`` (the server's --max-request-bytes, initially 1.5 MiB) less 4 KiB;
    more raises StoreLimitError. multi_set is atomic for up to 100 keys that fit in one request. The store does not
    notice that a process ends (``set_on_disconnect`` returns None), and one that is killed inside of a barrier stays
    counted there. A forked child connects anew by itself.

    ``answer_timeout`` (initially 5 s) is how long the members together may take to answer one request.

    Raises DistNetworkError when no endpoint can be reached; later calls raise StoreLost within twice
    ``answer_timeout`` once none can be reached, and DistStoreError with the server's text when it refuses a request.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        prefix: str,
        timeout: Timeout = DEFAULT_STORE_TIMEOUT,
        *,
        time_to_live: Timeout = DEFAULT_TIME_TO_LIVE,
        user: str | None = None,
        password: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        cert_file: str | os.PathLike[str] | None = None,
        key_file: str | os.PathLike[str] | None = None,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        answer_timeout: Timeout = ANSWER_SECONDS,
    ) -> None:
        self.set_timeout(timeout)
        self._max_value_bytes = max_request_bytes - _BYTES_BESIDE_VALUE
        namespace = f"procgroup/{quote(checked_prefix(prefix), safe='')}/"
        addresses, uses_tls = _parsed(endpoints, uses_files=any((ca_file, cert_file, key_file)))
        tls = _tls_context(ca_file, cert_file, key_file) if uses_tls else None
        gateway = EtcdGateway(addresses, tls, user, password, checked_answer_timeout(answer_timeout))
        self._keys = EtcdKeys(gateway, namespace, checked_time_to_live(time_to_live), max_request_bytes)
        self._connect()

    def _connect(self) -> None:
        try:
            self._keys.connect(min(self._seconds, ANSWER_SECONDS))
        except StoreLost as error:
            raise DistNetworkError(
                f"cannot connect to etcd at {self._keys.gateway}: {error.reason}. Start etcd, or correct the endpoints."
            ) from error
        except Refusal as refusal:
            raise DistStoreError(f"{refusal}. Look at the user, the password and the user's roles.") from refusal

    @property
    def endpoint(self) -> str:
        """The endpoint that gets the next request, as host:port."""
        return str(self._keys.gateway.endpoint)

    def _write(self, pairs: Mapping[str, bytes]) -> None:
        self._keys.put({self._value_key(key): value for key, value in pairs.items()})

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        found = self._keys.find_each(KeyRange(self._value_key(key)) for key in keys)
        return [each[0].value if each else None for each in found]

    def _exist(self, keys: Sequence[str]) -> list[bool]:
        return list(map(bool, self._keys.find_each(map(self._all_of, keys), keys_only=True, limit="1")))

    def _add(self, key: str, amount: int) -> int:
        def added(value: bytes | None) -> bytes:
            return b"%d" % sum_of(key, b"0" if value is None else value, amount)

        return int(self._change(self._value_key(key), added) or 0)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes | None:
        return self._change(self._value_key(key), lambda value: desired if (value or b"") == expected else value)

    def _append(self, key: str, tail: bytes) -> None:
        self._change(self._value_key(key), lambda value: self._checked((value or b"") + tail))

    def delete_key(self, key: str) -> bool:
        return self._keys.delete(self._all_of(checked_key(key))) > 0

    def list_keys(self, prefix: str = "") -> list[str]:
        beginning = self._keys.namespace + "k/"
        found = self._keys.find(KeyRange.below(beginning + _quoted(checked_key(prefix))), keys_only=True)
        return sorted({unquote(each.key.removeprefix(beginning).partition("/")[0]) for each in found})

    def _push(self, key: str, value: bytes) -> None:
        self._keys.create(self._queue_keys(key).start + uuid.uuid4().hex, value)

    def _pop(self, key: str) -> bytes | None:
        wanted = self._queue_keys(key)
        while items := self._keys.find(wanted, limit="1", sort_order="ASCEND", sort_target="CREATE"):
            if self._keys.delete_unchanged(items[0]):
                return items[0].value
        return None

    def queue_len(self, key: str) -> int:
        return self._keys.count(self._queue_keys(checked_key(key)))

    def _enter_barrier(self, key: str, world_size: int, caller: str) -> str | None:
        entered = Barrier(caller, world_size, (caller,))

        def enter(cell: bytes | None) -> bytes | None:
            nonlocal entered
            barrier = Barrier.parse(cell) if cell else Barrier(caller, world_size, ())
            if barrier.world_size != world_size:
                raise other_world_size(key, barrier.world_size, world_size)
            entered = barrier._replace(callers=(*barrier.callers, caller))
            return None if len(entered.callers) >= world_size else entered.cell()

        is_open = self._change(self._barrier_key(key), enter) is None
        return None if is_open else entered.round

    def _leave_barrier(self, key: str, round_: str, caller: str) -> bool:
        is_completed = False

        def leave(cell: bytes | None) -> bytes | None:
            nonlocal is_completed
            barrier = Barrier.parse(cell) if cell else None
            is_completed = barrier is None or barrier.round != round_
            return cell if is_completed or barrier is None else barrier.without(caller).cell()

        self._change(self._barrier_key(key), leave)
        return not is_completed

    def _read_barrier(self, key: str) -> bytes | None:
        found = self._keys.find(KeyRange(self._barrier_key(key)))
        return found[0].value if found else None

    def _watch(self, awaited: AwaitedKeys) -> AbstractContextManager[EtcdWatch]:
        if awaited.barriers:
            ranges = [KeyRange(self._barrier_key(key)) for key in awaited.keys]
        else:
            ranges = [self._all_of(key) for key in awaited.keys]
        # Entering a barrier changes its cell; only the deletion of the cell, the barrier's end, wakes the callers.
        return self._keys.watch(ranges, deletions=awaited.barriers)

    def delete_all(self) -> None:
        self._keys.delete_all()

    def clone(self) -> EtcdStore:
        clone = copy(self)
        clone._keys = self._keys.clone()
        return clone

    def close(self) -> None:
        self._keys.gateway.close()

    def _change(self, key: str, replace: Callable[[bytes | None], bytes | None]) -> bytes | None:
        return self._keys.change(key, replace, self._seconds)

    def _value_key(self, key: str) -> str:
        return f"{self._keys.namespace}k/{_quoted(key)}/v"

    def _queue_keys(self, key: str) -> KeyRange:
        return KeyRange.below(f"{self._keys.namespace}k/{_quoted(key)}/q/")

    def _all_of(self, key: str) -> KeyRange:
        return KeyRange.below(f"{self._keys.namespace}k/{_quoted(key)}/")

    def _barrier_key(self, key: str) -> str:
        return f"{self._keys.namespace}b/{_quoted(key)}"


def _quoted(key: str) -> str:
    return quote(key, safe="")


def _parsed(endpoints: str | Sequence[str], *, uses_files: bool) -> tuple[list[Endpoint], bool]:
    """Return the addresses of endpoints, and whether they use TLS. Raises ValueError for an invalid endpoint."""
    texts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    default = "https" if uses_files else "http"
    parts = [urlsplit(text.strip() if "://" in text else f"{default}://{text.strip()}") for text in texts]
    if any("@" in part.netloc for part in parts):
        raise ValueError("an endpoint holds a user or a password: pass user= and password= instead")
    schemes = {part.scheme for part in parts}
    if not all(part.hostname for part in parts) or schemes not in ({"http"}, {"https"}):
        raise ValueError(f"expected endpoints such as 'host:2379', all with TLS (https://) or none, got {endpoints!r}")
    if uses_files and schemes == {"http"}:
        raise ValueError("files for TLS were given with endpoints without TLS: write https:// instead of http://")
    return [Endpoint(part.hostname or "", part.port or _DEFAULT_PORT) for part in parts], schemes == {"https"}


def _tls_context(
    ca_file: str | os.PathLike[str] | None,
    cert_file: str | os.PathLike[str] | None,
    key_file: str | os.PathLike[str] | None,
) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except OSError as error:  # its text does not name the file
        raise ValueError(
            f"cannot use the files for TLS (ca_file={ca_file}, cert_file={cert_file}, key_file={key_file}): {error}"
        ) from error
    return context
