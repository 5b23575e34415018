"""torch's error file: read when a rank left one, written by our decorator, passed on by the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import procgroup
from procgroup.launch.failures.failure import RankFailure
from procgroup.process.error_file import (
    MAX_FILE_BYTES,
    ErrorRecord,
    leave,
    pass_on,
    read_error_file,
    read_origin,
    write_error_file,
)
from procgroup.process.exit_reason import CALL, PEER, Origin

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in main\n    f()\nValueError: boom\n'
NESTED: dict[str, Any] = {
    "message": {"message": "ValueError: boom", "extraInfo": {"py_callstack": TRACEBACK, "timestamp": "17"}}
}


def test_both_of_torch_s_forms_are_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps(NESTED))
    assert read_error_file(path) == ErrorRecord("ValueError: boom", TRACEBACK, NESTED)
    path.write_text('{"message": "plain", "timestamp": 17}')
    found = read_error_file(path)
    assert found is not None
    assert (found.message, found.traceback) == ("plain", "")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"message": 3}', b'{"message": {"message": []}}', b"\xff\xfe", b"[" * 100_000],
)
def test_a_broken_file_is_no_obstacle(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    assert read_error_file(path) is None


def test_what_is_no_plain_file_of_a_sensible_size_is_not_read(tmp_path: Path) -> None:
    assert read_error_file(tmp_path / "missing") is None
    assert read_error_file(tmp_path) is None
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_error_file(pipe) is None
    large = tmp_path / "large"
    large.write_text(json.dumps({"message": "x" * MAX_FILE_BYTES}))
    assert read_error_file(large) is None


def test_the_record_is_the_evidence_also_where_stderr_has_another_traceback() -> None:
    stderr = TRACEBACK.replace("boom", "of stderr")
    found = RankFailure(
        rank=0, pid=1, exit_code=1, time=1.0, stderr=stderr, record=ErrorRecord("OSError: kept", "Kept\n")
    )
    assert (found.reason, found.evidence) == ("OSError: kept", "Kept\n")
    plain = RankFailure(rank=0, pid=1, exit_code=1, time=1.0, stderr=stderr, record=ErrorRecord("a message"))
    assert (plain.reason, plain.evidence) == ("a message", stderr)
    crashed = RankFailure(
        rank=0, pid=1, exit_code=-11, time=1.0, stderr="", record=ErrorRecord("OSError: kept", "Kept\n")
    )
    assert crashed.reason == "OSError: kept; then killed by SIGSEGV"


@pytest.mark.parametrize("origin", [Origin(), Origin(CALL), Origin(PEER), Origin(PEER, 3)])
def test_the_origin_of_a_failure_is_written_and_read(tmp_path: Path, origin: Origin) -> None:
    path = tmp_path / "error.json"
    write_error_file(path, ErrorRecord("ValueError: boom", TRACEBACK, origin=origin))
    found = read_error_file(path)
    assert found is not None and (found.message, found.traceback, found.origin) == (
        "ValueError: boom",
        TRACEBACK,
        origin,
    )


@pytest.mark.parametrize(
    "written", [None, [], {}, {"origin": "peers"}, {"origin": ["peer"]}, {"origin": 3, "peer": 1}, "peer"]
)
def test_what_is_no_origin_is_none(tmp_path: Path, written: Any) -> None:
    path = tmp_path / "error.json"
    message = dict(NESTED["message"], extraInfo={"procgroup": written})
    path.write_text(json.dumps({"message": message}))
    found = read_error_file(path)
    assert found is not None and found.origin is None


def test_an_origin_s_peer_that_is_no_rank_is_not_known(tmp_path: Path) -> None:
    for peer in (-1, True, 1.0, "1", None, 1 << 40):
        assert read_origin({"origin": "peer", "peer": peer}) == Origin(PEER)


def test_the_file_of_another_decorator_is_kept_and_gets_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    path.write_text(json.dumps(NESTED | {"more": 1}))
    leave(ValueError("boom"))
    extra = NESTED["message"]["extraInfo"] | {"procgroup": {"origin": "own", "peer": None}}
    assert json.loads(path.read_text()) == {"message": NESTED["message"] | {"extraInfo": extra}, "more": 1}
    leave(ValueError("another"))
    assert json.loads(path.read_text())["message"]["message"] == "ValueError: another"


def test_passing_on_adds_the_exit_code_inside_of_the_message(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text("what was there before")
    pass_on(path, ErrorRecord("m", "t", NESTED | {"more": 1}), message="", traceback="", exit_code=7)
    passed_on = json.loads(path.read_text())
    assert passed_on["message"] == NESTED["message"] | {"errorCode": 7}
    assert passed_on["more"] == 1
    assert os.listdir(tmp_path) == ["own.json"]


def test_a_rank_that_left_no_file_is_passed_on_by_what_is_known_of_it(tmp_path: Path) -> None:
    pass_on(tmp_path / "own.json", None, message="killed by SIGKILL", traceback="", exit_code=-9)
    message = json.loads((tmp_path / "own.json").read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("killed by SIGKILL", -9)


def run(source: str, tmp_path: Path, error_file: Path | None) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(source)
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
    if error_file is not None:
        environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
    return subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=120)


DECORATED = """
import faulthandler, sys
from procgroup import record
@record
def main(number):
    assert faulthandler.is_enabled()
    if number == 0: return "fine"
    if number == 1: raise ValueError("boom")
    if number == 2: sys.exit(5)
    if number == 3: raise ValueError("x" * 5_000_000)
print(main({number}))
"""


def test_the_decorator_keeps_the_exception_and_raises_it_again(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    done = run(DECORATED.format(number=1), tmp_path, path)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: boom\n")
    kept = read_error_file(path)
    assert kept is not None
    assert kept.message == "ValueError: boom"
    assert kept.traceback.count("  File ") == 1, "the decorator's own frame is left out"
    assert isinstance(kept.content["message"]["extraInfo"]["timestamp"], str)
    failure = RankFailure(rank=0, pid=1, exit_code=1, time=1.0, stderr=done.stderr)
    assert "procgroup" not in failure.evidence.replace(str(tmp_path), ""), "nor is it in the report"


@pytest.mark.parametrize(("number", "status"), [(0, 0), (2, 5)])
def test_no_file_is_written_for_an_orderly_end(tmp_path: Path, number: int, status: int) -> None:
    done = run(DECORATED.format(number=number), tmp_path, tmp_path / "error.json")
    assert (done.returncode, done.stderr) == (status, "")
    assert not (tmp_path / "error.json").exists()


def test_a_file_that_cannot_be_written_hides_no_exception(tmp_path: Path) -> None:
    for error_file in (None, tmp_path / "no" / "such" / "directory", Path("/dev/full")):
        done = run(DECORATED.format(number=1), tmp_path, error_file)
        assert done.stderr.endswith("ValueError: boom\n")
    assert Path("/dev/full").is_char_device(), "it must not be replaced"


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    run(DECORATED.format(number=3), tmp_path, path)
    assert path.stat().st_size < MAX_FILE_BYTES
    assert read_error_file(path) is not None


def test_the_decorated_function_keeps_its_name_and_its_result() -> None:
    @procgroup.record
    def main(number: int, *, factor: int = 2) -> int:
        return number * factor

    assert main(3, factor=5) == 15
    assert main.__name__ == "main"


@pytest.mark.torch
def test_torch_and_procgroup_read_each_other_s_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    path = tmp_path / "error.json"
    write_error_file(path, ErrorRecord("ValueError: ours", TRACEBACK, origin=Origin(PEER, 3)))
    theirs: Any = errors.ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert theirs.message["message"] == "ValueError: ours"

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

    @errors.record
    def main() -> None:
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        main()
    kept = read_error_file(path)
    assert kept is not None
    assert kept.message == "ValueError: theirs"
    assert "in main" in kept.traceback
