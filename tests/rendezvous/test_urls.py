"""The parts that a URL and the environment must have, and the errors where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from procgroup.cluster.addresses import parse_endpoint, parse_port
from procgroup.rendezvous import handlers
from procgroup.rendezvous.handlers import register_rendezvous_handler, rendezvous
from procgroup.stores.hash import HashStore
from procgroup.stores.store import Store
from procgroup.types import Endpoint
from world import free_port

PLACE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACE, "PROCGROUP_STORE", "PROCGROUP_INIT_METHOD", "TORCH_DISTRIBUTED_INIT_METHOD"):
        monkeypatch.delenv(name, raising=False)


def meet(url: str, *arguments: Any, **keywords: Any) -> tuple[Store, int, int]:
    return next(rendezvous(url, *arguments, **keywords))


@pytest.mark.parametrize("missing", PLACE)
def test_a_missing_variable_is_named_with_those_that_are_set_and_the_cure(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PLACE.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    text = f"environment variable {missing} expected, but not set; already set: "
    with pytest.raises(ValueError, match=text) as caught:
        meet("env://")
    shown = [f"{name}={value}" for name, value in PLACE.items() if name != missing]
    assert ", ".join(shown) in str(caught.value)
    assert "procgroup run" in str(caught.value)


def test_an_empty_environment_names_all_that_is_missing() -> None:
    text = r"variable RANK expected, but not set \(also missing: WORLD_SIZE, MASTER_ADDR, MASTER_PORT\); already set"
    with pytest.raises(ValueError, match=text):
        meet("env://")


def test_a_variable_that_is_empty_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(ValueError, match="environment variable MASTER_ADDR expected"):
        meet("env://")


@pytest.mark.parametrize(("name", "value"), [("RANK", "one"), ("WORLD_SIZE", "2.5"), ("MASTER_PORT", "http")])
def test_a_variable_that_is_no_number_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, text in PLACE.items():
        monkeypatch.setenv(key, text)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"environment variable {name}='{value}' is not usable"):
        meet("env://")


def test_a_given_place_is_not_asked_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for url, arguments in (("env://", (0, 1)), ("env://?rank=0&world_size=1", ()), ("env://?rank=5", (0, 1))):
        store, rank, size = meet(url, *arguments)
        assert (type(store), rank, size) == (HashStore, 0, 1)
    with pytest.raises(ValueError, match="variable MASTER_ADDR expected"):
        meet("env://", 0, 3)


@pytest.mark.parametrize(
    ("rank", "size", "text"), [(2, 2, "between 0 and 1"), (-2, 2, "between 0 and 1"), (0, 0, "at least 1")]
)
def test_a_place_outside_the_world_is_refused(rank: int, size: int, text: str, tmp_path: Any) -> None:
    for url in ("env://", "tcp://127.0.0.1:29500", f"file://{tmp_path}/meeting"):
        with pytest.raises(ValueError, match=text):
            meet(url, rank, size)


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:29500", "file:///tmp/never-made"])
def test_a_url_without_rank_or_world_size_says_so(url: str) -> None:
    with pytest.raises(ValueError, match="rank parameter missing. Pass rank="):
        meet(url)
    with pytest.raises(ValueError, match="world size parameter missing. Pass world_size="):
        meet(url, 0)
    with pytest.raises(ValueError, match="rank parameter missing"):
        meet(f"{url}?world_size=2")
    with pytest.raises(ValueError, match="expected rank in .* to be an integer, got 'x'"):
        meet(f"{url}?rank=x&world_size=2")


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:", ":29500", "host:port", "host:70000", "::1:29500"])
def test_a_tcp_url_with_a_bad_address_shows_the_form(address: str) -> None:
    with pytest.raises(ValueError, match="using tcp:// rendezvous: expected .*Write tcp://host:port"):
        meet(f"tcp://{address}", 0, 2)


@pytest.mark.parametrize("url", ["file://", "file:///", "file://relative/path"])
def test_a_file_url_without_an_absolute_path_shows_the_form(url: str) -> None:
    with pytest.raises(ValueError, match="path missing or not absolute .*Write file:///path"):
        meet(url, 0, 2)


@pytest.mark.parametrize("url", ["foo://x", "no-scheme", ""])
def test_an_unknown_scheme_is_refused_with_the_known_ones(url: str) -> None:
    with pytest.raises(
        RuntimeError, match="No rendezvous handler for .*; there are env://, file://, mpi://, slurm://, tcp://"
    ):
        meet(url, 0, 2)


def test_arguments_of_a_wrong_type_are_type_errors() -> None:
    with pytest.raises(TypeError, match="`url` must be a string. <class 'int'>: 3"):
        meet(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`rank` must be an integer"):
        meet("env://", "0")
    with pytest.raises(TypeError, match="`world_size` must be an integer"):
        meet("env://", 0, 2.0)
    with pytest.raises(TypeError, match="expected timeout to be"):
        meet(f"tcp://127.0.0.1:{free_port()}", 0, 2, timeout="x")


def test_a_registered_handler_serves_its_scheme_and_gets_the_place_in_the_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handlers, "_handlers", dict(handlers._handlers))
    seen = []

    def handler(url: str, **keywords: Any) -> Iterator[tuple[Store, int, int]]:
        seen.append((url, keywords))
        yield HashStore(), 3, 4

    register_rendezvous_handler("room", handler)
    _, rank, size = meet("room://blue?a=b&rank=9", 3, 4, timeout=5)
    assert (rank, size) == (3, 4)
    assert seen == [("room://blue?a=b&rank=3&world_size=4", {"timeout": 5})]
    with pytest.raises(RuntimeError, match="Rendezvous handler for room:// already registered"):
        register_rendezvous_handler("room", handler)
    with pytest.raises(RuntimeError, match="Rendezvous handler for tcp:// already registered"):
        register_rendezvous_handler("tcp", handler)


@pytest.mark.parametrize(
    ("text", "host", "port"), [("a:1", "a", 1), ("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:65535", "::1", 65535)]
)
def test_an_endpoint_is_read_and_written_back(text: str, host: str, port: int) -> None:
    assert parse_endpoint(text) == Endpoint(host, port)
    assert str(parse_endpoint(text)) == text


@pytest.mark.parametrize("port", [-1, 65536, "-1", "", " 1", "1.0", "१"])
def test_a_bad_port_is_refused(port: int | str) -> None:
    with pytest.raises(ValueError, match="expected a port"):
        parse_port(port)
