"""What is RedisStore's own: URLs, passwords, TLS, the optional client library."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from stores import certificates

import world
from database_servers import lacks_redis, redis_server
from procgroup.errors import DistNetworkError, DistStoreError
from procgroup.stores import RedisStore

pytestmark = [pytest.mark.skipif(bool(lacks_redis()), reason=lacks_redis())]


@pytest.mark.parametrize("url", ["http://127.0.0.1", "127.0.0.1:6379", "unix:///tmp/socket", ""])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL such as redis://host:6379/0"):
        RedisStore(url, "job")


def test_files_for_tls_need_a_url_for_tls() -> None:
    with pytest.raises(ValueError, match="write rediss:// instead of redis://"):
        RedisStore("redis://127.0.0.1", "job", ca_file="ca.pem")


def test_a_password_is_needed_where_the_server_asks_for_one(tmp_path: Path) -> None:
    port = world.free_port()
    rank = ("--user", "rank", "on", ">word", "~*", "&*", "+@all")
    with redis_server(tmp_path, port, "--requirepass", "secret", *rank):
        for url, arguments in [
            (f"redis://:secret@127.0.0.1:{port}/1", {}),
            (f"redis://rank:word@127.0.0.1:{port}/1", {}),
            (f"redis://127.0.0.1:{port}/1", {"password": "secret"}),
            (f"redis://127.0.0.1:{port}/1", {"user": "rank", "password": "word"}),
        ]:
            with RedisStore(url, "job", **arguments) as store:
                store.add("number", 1)
        with RedisStore(url, "job", user="rank", password="word") as store:
            assert store.get("number") == b"4"
            with RedisStore(f"redis://:secret@127.0.0.1:{port}/0", "job") as other:
                assert other.num_keys() == 0, "the URL names another database"
        for bad in (f"redis://127.0.0.1:{port}", f"redis://:wrong@127.0.0.1:{port}"):
            with pytest.raises(DistStoreError, match=f"the Redis server at 127.0.0.1:{port} refuses") as caught:
                RedisStore(bad, "job")
            assert "wrong" not in str(caught.value).replace("WRONGPASS", "").lower(), "an error shows a password"


@pytest.mark.skipif(bool(certificates.lacks()), reason=certificates.lacks())
def test_tls_proves_the_server_and_the_client(tmp_path: Path) -> None:
    ours, others = certificates.make(tmp_path / "ours"), certificates.make(tmp_path / "others")
    port = world.free_port()
    files = ("--tls-ca-cert-file", ours.ca, "--tls-cert-file", ours.cert, "--tls-key-file", ours.key)
    with redis_server(tmp_path, 0, "--tls-port", str(port), *files, answering=port):
        url = f"rediss://127.0.0.1:{port}"
        with RedisStore(url, "job", ca_file=ours.ca, cert_file=ours.cert, key_file=ours.key) as store:
            store.set("key", "value")
            assert store.clone().get("key") == b"value"
        with pytest.raises(DistNetworkError, match=f"127.0.0.1:{port}.*certificate"):
            RedisStore(url, "job", ca_file=others.ca, cert_file=ours.cert, key_file=ours.key)
        with pytest.raises(DistNetworkError, match=f"127.0.0.1:{port}"):
            RedisStore(url, "job", ca_file=ours.ca)


def test_a_server_without_memory_refuses_in_its_own_words(tmp_path: Path) -> None:
    port = world.free_port()
    with redis_server(tmp_path, port, "--maxmemory", "1mb"), RedisStore(f"redis://127.0.0.1:{port}", "job") as store:
        with suppress(DistStoreError):
            store.set("key", bytes(2_000_000))
        with pytest.raises(DistStoreError, match="refuses: .*maxmemory"):
            store.queue_push("queue", "item")
        assert store.queue_len("queue") == 0


def test_where_the_client_library_is_missing_the_error_says_how_to_install_it() -> None:
    program = """
import sys
sys.modules["redis"] = None
import procgroup
try:
    procgroup.RedisStore("redis://127.0.0.1", "job")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "pip install redis" in done.stdout, done.stderr
