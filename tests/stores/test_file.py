"""What is FileStore's own: files left behind, torn writes, full disks, other jobs, other files."""

from __future__ import annotations

import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from procgroup.errors import DistStoreError
from procgroup.stores import FileStore
from procgroup.stores.log_file import MAGIC, RequestLog

HOLD = """
import sys, time
from procgroup.stores import FileStore
store = FileStore(sys.argv[1], int(sys.argv[2]))
print("open", flush=True)
while True:
    store.add("n", 1)
    if len(sys.argv) > 3:
        time.sleep(1)
"""


def start(path: Path, world_size: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(path), str(world_size), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    process.stdout.close()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_the_file_is_the_owners_alone_and_its_path_is_told(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(str(path), 1) as store:
        assert store.path == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_last_to_leave_a_complete_job_deletes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    stores = [FileStore(str(path), 2) for _ in range(2)]
    stores[0].close()
    assert path.exists()
    assert stores[1].set("key", "x") is None
    stores[1].close()
    assert not path.exists()


def test_a_file_that_a_program_deletes_while_the_last_one_leaves_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"

    def delete_after_the_check(file: RequestLog) -> bool:
        path.unlink()
        return False

    store = FileStore(str(path), 1)
    monkeypatch.setattr(RequestLog, "is_replaced", delete_after_the_check)
    store.close()
    assert not path.exists()


def test_without_a_world_size_the_file_and_its_keys_stay(tmp_path: Path) -> None:
    with FileStore(str(tmp_path / "store")) as store:
        store.set("key", "x")
    with FileStore(str(tmp_path / "store")) as store:
        assert store.get("key", 1) == b"x"


def test_an_empty_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    with FileStore(str(tmp_path / "store"), 1) as store:
        assert store.num_keys() == 0


@pytest.mark.parametrize("content", [b"something else entirely\n", b"\0" * 5000])
def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store"
    path.write_bytes(content)
    with pytest.raises(DistStoreError, match="is not a procgroup FileStore"):
        FileStore(str(path), 1)
    assert path.read_bytes() == content


def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(DistStoreError, match="cannot open .*nowhere"):
        FileStore(str(tmp_path / "nowhere" / "store"))


def test_a_file_whose_processes_were_killed_is_begun_again(tmp_path: Path, sampled: bool) -> None:
    path = tmp_path / "store"
    moments = random.Random(25)
    for _ in range(4 if sampled else 100):
        processes = [start(path, 2) for _ in range(2)]
        time.sleep(moments.random() * 0.02)  # the moment of the kill is the point of this test
        for process in processes:
            kill(process)
        with FileStore(str(path), 2) as store:
            assert store.num_keys() == 0
            assert store.add("n", 1) == 1


def test_a_second_job_on_the_path_of_a_running_one_is_refused_within_seconds(tmp_path: Path) -> None:
    path = tmp_path / "store"
    running = start(path, 1, "slow")
    began = time.monotonic()
    with pytest.raises(DistStoreError, match=f"in use by another job: .*:{running.pid} are all of its 1 processes"):
        FileStore(str(path), 1)
    assert time.monotonic() - began < 10
    kill(running)
    FileStore(str(path), 1).close()


@pytest.mark.parametrize("tail", [b"\x10", b"\xff\xff\0\0abcdefgh", MAGIC])
def test_what_a_killed_writer_left_unfinished_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "store"
    with FileStore(str(path)) as store:
        store.set("key", "x")
        with path.open("ab") as file:
            file.write(tail)
        assert store.get("key", 1) == b"x"
        store.set("other", "y")
        assert FileStore(str(path)).multi_get(["key", "other"], 1) == [b"x", b"y"]


def test_a_full_disk_raises_and_breaks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(str(path)) as store:
        store.set("key", "x")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, before[1]))
        try:
            with pytest.raises(DistStoreError, match="cannot write .* bytes .*Nothing was stored"):
                store.set("key", "y" * 5000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert store.get("key", 1) == b"x"
        assert FileStore(str(path)).get("key", 1) == b"x"
        store.set("key", "z" * 5000)
        assert store.get("key", 1) == b"z" * 5000


def test_a_stopped_process_that_holds_the_file_ends_no_call_late(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(str(path)) as store:
        with store._shared.file.mutex(1):
            other = FileStore.__new__(FileStore)
            with pytest.raises(DistStoreError, match="could not lock"):
                FileStore.__init__(other, str(path))
        assert store.num_keys() == 0


def test_processes_count_together(tmp_path: Path) -> None:
    path = tmp_path / "store"
    text = "from procgroup.stores import FileStore; s = FileStore({!r}); [s.add('n', 1) for _ in range(50)]"
    processes = [subprocess.Popen([sys.executable, "-c", text.format(str(path))]) for _ in range(3)]
    assert [process.wait(30) for process in processes] == [0, 0, 0]
    with FileStore(str(path)) as store:
        assert store.get("n", 1) == b"150"
    assert os.listdir(tmp_path) == ["store"]
