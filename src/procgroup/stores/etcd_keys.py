"""One job's keys on an etcd cluster: reads, transactions, and the lease of all its keys.

The id of the lease is a hash of the job's prefix, so every process of a job uses the same lease. Changes renew it; some
time after the last change it expires, and etcd removes all keys of the job.
"""

from __future__ import annotations

import hashlib
import random
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

from procgroup.errors import DistStoreError, Refusal, StoreLimitError, StoreLost, StoreTimeout
from procgroup.stores.etcd_gateway import EtcdGateway, EtcdWatch

MAX_OPERATIONS = 100
"""Operations in one transaction; etcd takes 128 unless it was started with another --max-txn-ops."""

_BYTES_PER_OPERATION = 96
_RENEWALS_PER_LIFE = 10
_LONGEST_PAUSE = 0.1
_NOT_FOUND, _EXISTS = 5, 9
_TOO_LARGE = ("request is too large", "message larger than max")

Operation = dict[str, dict[str, str]]


class KeyRange(NamedTuple):
    """The keys from ``start`` up to but not including ``end``; ``start`` alone where ``end`` is empty."""

    start: str
    end: str = ""

    @classmethod
    def below(cls, beginning: str) -> KeyRange:
        """Return the range of all keys that begin with an ASCII text."""
        return cls(beginning, beginning[:-1] + chr(ord(beginning[-1]) + 1))

    def encoded(self) -> dict[str, str]:
        return {"key": _encoded(self.start)} | ({"range_end": _encoded(self.end)} if self.end else {})


class KeyValue(NamedTuple):
    """A key, its value, and the revision of the last change."""

    key: str
    value: bytes
    revision: int


class EtcdKeys:
    """The keys of one job."""

    def __init__(self, gateway: EtcdGateway, namespace: str, time_to_live: float, max_request_bytes: int) -> None:
        self.gateway = gateway
        self.namespace = namespace
        self.max_request_bytes = max_request_bytes
        self._time_to_live = time_to_live
        self._lease = str(int.from_bytes(hashlib.sha256(namespace.encode()).digest()[:8]) >> 1)
        self._renewed = 0.0

    def clone(self) -> EtcdKeys:
        """Return the same keys on connections of their own."""
        clone = copy(self)
        clone.gateway = self.gateway.clone()
        return clone

    def connect(self, timeout: float | None = None) -> None:
        """Create the job's lease, or renew it."""
        request = {"ID": self._lease, "TTL": str(max(1, round(self._time_to_live)))}
        try:
            self._request("lease/grant", request, timeout=timeout)
        except Refusal as refusal:
            if refusal.code != _EXISTS:
                raise
            self._request("lease/keepalive", {"ID": self._lease}, timeout=timeout)
        self._renewed = time.monotonic()

    def find(self, wanted: KeyRange, **options: object) -> list[KeyValue]:
        """Return the keys of a range; ``options`` are those of etcd's range request."""
        answer = self._call("kv/range", {**wanted.encoded(), **options})
        return _key_values(answer)

    def find_each(self, ranges: Iterable[KeyRange], **options: object) -> list[list[KeyValue]]:
        """Return the keys of several ranges."""
        operations = [{"request_range": {**wanted.encoded(), **options}} for wanted in ranges]
        return [
            _key_values(answer["response_range"])
            for start in range(0, len(operations), MAX_OPERATIONS)
            for answer in self._call("kv/txn", {"success": operations[start : start + MAX_OPERATIONS]})["responses"]
        ]

    def count(self, wanted: KeyRange) -> int:
        return int(self._call("kv/range", {**wanted.encoded(), "count_only": True}).get("count", 0))

    def put(self, pairs: Mapping[str, bytes]) -> None:
        """Store values, in batches of at most MAX_OPERATIONS that fit in one request. Raises StoreLimitError."""
        for batch in self._batches_of_puts(pairs):
            self._with_lease("kv/txn", {"success": batch}, repeatable=True)

    def delete(self, unwanted: KeyRange) -> int:
        """Delete the keys of a range and return how many there were."""
        answer = self._call("kv/deleterange", unwanted.encoded(), repeatable=False)
        return int(answer.get("deleted", 0))

    def delete_unchanged(self, found: KeyValue) -> bool:
        """Delete a key unless it has changed since it was found; return whether it is deleted."""
        is_done, _ = self._replace(found.key, found, None)
        return is_done

    def create(self, key: str, value: bytes) -> None:
        """Store a key that no other process stores."""
        self._replace(key, None, value)

    def change(self, key: str, replace: Callable[[bytes | None], bytes | None], timeout: float) -> bytes | None:
        """Replace a key's value by ``replace(value)``, atomically, and return the new value (None: no key).

        Raises StoreTimeout when others have changed the key again and again for ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        pause = 0.001
        found = _first(self.find(KeyRange(key)))
        while True:
            old = found.value if found else None
            new = replace(old)
            if new == old:
                return new
            is_done, found = self._replace(key, found, new)
            if is_done:
                return new
            if time.monotonic() > deadline:
                raise StoreTimeout(keys=(key,), seconds=timeout, what="change")
            time.sleep(random.uniform(0, pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _replace(self, key: str, found: KeyValue | None, new: bytes | None) -> tuple[bool, KeyValue | None]:
        """Put or delete a key unless it has changed since ``found``; otherwise return its present value."""
        operation = {"request_delete_range": KeyRange(key).encoded()} if new is None else self._put_operation(key, new)
        body = {
            # A missing key has revision 0.
            "compare": [{"key": _encoded(key), "target": "MOD", "mod_revision": str(found.revision if found else 0)}],
            "success": [operation],
            "failure": [{"request_range": KeyRange(key).encoded()}],
        }
        answer = self._transact(body)
        if answer.get("succeeded", False):
            return True, None
        return False, _first(_key_values(answer["responses"][0]["response_range"]))

    def _transact(self, body: Mapping[str, object]) -> Any:
        """Execute a transaction with a condition; when its answer is lost, repeat it at another endpoint.

        The condition holds for one of the two at most: if the second succeeds, the first has changed nothing.
        """
        try:
            return self._with_lease("kv/txn", body, repeatable=False)
        except StoreLost:
            if not self.gateway.can_fail_over:
                raise
            answer = self._with_lease("kv/txn", body, repeatable=False)
            if not answer.get("succeeded", False):
                raise
            return answer

    def delete_all(self) -> None:
        """Delete every key of the job and its lease; the next change creates a new lease."""
        self.delete(KeyRange.below(self.namespace))
        try:
            self._request("lease/revoke", {"ID": self._lease})
        except Refusal as refusal:
            if refusal.code != _NOT_FOUND:
                raise DistStoreError(str(refusal)) from refusal

    @contextmanager
    def watch(self, ranges: Sequence[KeyRange], *, deletions: bool) -> Iterator[EtcdWatch]:
        """Watch ranges of keys from now on, for deletions or for puts."""
        filters = ["NOPUT"] if deletions else ["NODELETE"]
        requests = [{**wanted.encoded(), "filters": filters} for wanted in ranges]
        with _refusals_translated(), self.gateway.watch(requests) as watch:
            yield watch

    def _put_operation(self, key: str, value: bytes) -> Operation:
        size = len(key) * 2 + len(value) + _BYTES_PER_OPERATION
        if size > self.max_request_bytes:
            raise StoreLimitError(what="a request to etcd", size=size, limit=self.max_request_bytes)
        return {"request_put": {"key": _encoded(key), "value": b64encode(value).decode(), "lease": self._lease}}

    def _batches_of_puts(self, pairs: Mapping[str, bytes]) -> list[list[Operation]]:
        batches: list[list[Operation]] = [[]]
        size = 0
        for key, value in pairs.items():
            operation = self._put_operation(key, value)
            size += len(key) + len(value) + _BYTES_PER_OPERATION
            if batches[-1] and (len(batches[-1]) == MAX_OPERATIONS or size > self.max_request_bytes):
                batches.append([])
                size = len(key) + len(value) + _BYTES_PER_OPERATION
            batches[-1].append(operation)
        return batches if pairs else []

    def _with_lease(self, path: str, body: Mapping[str, object], *, repeatable: bool) -> Any:
        """Send a request that puts keys, after renewing the lease if that is due."""
        with _refusals_translated():
            if time.monotonic() - self._renewed > self._time_to_live / _RENEWALS_PER_LIFE:
                self.connect()
            try:
                return self._request(path, body, repeatable=repeatable)
            except Refusal as refusal:
                if refusal.code != _NOT_FOUND:
                    raise
            self.connect()  # the lease has ended
            return self._request(path, body, repeatable=repeatable)

    def _call(self, path: str, body: Mapping[str, object], *, repeatable: bool = True) -> Any:
        with _refusals_translated():
            return self._request(path, body, repeatable=repeatable)

    def _request(
        self, path: str, body: Mapping[str, object], *, repeatable: bool = True, timeout: float | None = None
    ) -> Any:
        return self.gateway.call(f"/v3/{path}", body, repeatable=repeatable, timeout=timeout)


@contextmanager
def _refusals_translated() -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        is_too_large = any(words in refusal.text for words in _TOO_LARGE)
        advice = ". Pass the --max-request-bytes of the server as max_request_bytes" if is_too_large else ""
        raise DistStoreError(f"{refusal}{advice}") from refusal


def _key_values(answer: Mapping[str, Any]) -> list[KeyValue]:
    return [
        KeyValue(b64decode(found["key"]).decode(), b64decode(found.get("value", "")), int(found["mod_revision"]))
        for found in answer.get("kvs", ())
    ]


def _first(found: Sequence[KeyValue]) -> KeyValue | None:
    return found[0] if found else None


def _encoded(text: str) -> str:
    return b64encode(text.encode()).decode()
