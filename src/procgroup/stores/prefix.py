"""A view of a store in which every key has a prefix, so that several users of the store do not share keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, Self, cast

from procgroup.stores.store import OnDisconnect, Store, checked_key
from procgroup.types import Timeout

if TYPE_CHECKING:
    from procgroup import _native


class PrefixStore(Store):
    """A view of another store whose ``key`` is ``prefix + "/" + key`` in that store.

    ``list_keys`` and ``num_keys`` return the keys of this prefix only. Its timeout is its own, initially
    the other store's. ``close`` leaves the other store open.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"expected store to be a procgroup Store, got {type(store).__name__}")
        self._prefix = checked_key(prefix) + "/"
        self._seconds = store._seconds
        self._use(store)

    @property
    def underlying_store(self) -> Store:
        """The store that contains the keys."""
        return self._store

    @property
    def prefix(self) -> str:
        """The prefix of each key, without the slash."""
        return self._prefix[:-1]

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self, prefix: str = "") -> list[str]:
        return [key.removeprefix(self._prefix) for key in super().list_keys(prefix)]

    def set_on_disconnect(self, key: str, value: str | bytes) -> OnDisconnect | None:
        return self._store.set_on_disconnect(self._prefix + checked_key(key), value)

    def is_hosted_here(self) -> bool:
        return self._store.is_hosted_here()

    def name_users(self, users: Mapping[int, str]) -> None:
        self._store.name_users(users)

    def with_timeout(self, timeout: Timeout) -> Self:
        view = self._view(timeout)
        view._use(self._store.with_timeout(timeout))
        return view

    def clone(self) -> Self:
        clone = copy(self)
        clone._use(self._store.clone())
        return clone

    def _use(self, store: Store) -> None:
        self._store = store
        self._requests = cast("_native.StoreRequests", _PrefixedRequests(store, self._prefix))


_KEYS = {"key", "keys", "unless", "prefix"}
_PARAMETERS = {
    name: list(method.__annotations__)
    for name, method in vars(Store).items()
    if callable(method) and (_KEYS & set(method.__annotations__))
}
"""The names of the parameters of Store's methods with keys, by the method's name."""


class _PrefixedRequests:
    """The requests of another store, with a prefix before each of their keys.

    The names of a method's parameters show which of its arguments are keys, and whether it waits.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _PARAMETERS:
            raise AttributeError(f"stores have no request {name!r}")
        parameters = _PARAMETERS[name]

        def request(*arguments: Any) -> Any:
            *given, seconds = map(self._prefixed, parameters, arguments)
            return getattr(self._store, name)(*given, *([seconds] if "timeout" in parameters else []))

        return request

    def _prefixed(self, parameter: str, argument: Any) -> Any:
        if parameter in ("key", "unless", "prefix"):
            return self._prefix + checked_key(argument)
        if parameter != "keys":
            return argument
        if isinstance(argument, (str, bytes)):
            raise TypeError("expected keys to be a sequence of str, got one str")
        return [self._prefix + checked_key(key) for key in argument]
