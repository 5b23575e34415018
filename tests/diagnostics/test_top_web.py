"""``procgroup top --web`` serves a live page of a job, to the browsers of its user alone."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from diagnostics.browser import CHROMIUM, WHY_NONE, Browser
from procgroup.diagnostics.recorded_job import reading
from procgroup.diagnostics.top import server as web_server
from procgroup.diagnostics.top.server import HttpAnswer, PageServer
from world import start

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NONE)
EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def work(rank: int, size: int) -> None:
    """Make steps until another process writes a file; rank 1 is the slowest."""
    dist.init_process_group()
    step, stop = 0, np.zeros(1)
    while not stop[0]:
        step += 1
        time.sleep(0.03 if rank == 1 else 0.005)
        dist.all_reduce(np.ones(1000))
        dist.report(step=step, loss=1 / step, phase=EVIL)
        stop[0] = Path(os.environ["STOP"]).exists()
        dist.broadcast(stop, src=0)
    dist.destroy_process_group()


def load_batch() -> None:
    time.sleep(60)


def hang(rank: int, size: int) -> None:
    dist.init_process_group()
    for _ in range(3):
        dist.all_reduce(np.ones(4))
    if rank == 2:
        load_batch()
    dist.all_reduce(np.ones(4))


class Top:
    """The command, and what it has printed."""

    def __init__(self, records: Path, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "procgroup", "top", "--web", *arguments],
            env=os.environ | {"PROCGROUP_RECORD_DIR": str(records)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.address = self.line().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", self.address), self.address

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def lines_until(self, text: str) -> str:
        lines = [self.line()]
        while text not in lines[-1]:
            assert lines[-1], "".join(lines)
            lines.append(self.line())
        return "".join(lines)

    def state(self, **parameters: object) -> dict[str, Any]:
        path = "".join(f"&{name}={value}" for name, value in parameters.items())
        return dict(json.loads(get(self.address.replace("/?", "/state?") + path)[1]))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def all_have_made_calls(directory: Path, size: int) -> bool:
    try:
        ranks = reading.load(next(directory.glob("*/")), with_stacks=False).ranks
    except (LookupError, StopIteration):
        return False
    return len(ranks) == size and all(rank.recorded >= 3 for rank in ranks)


@contextmanager
def job(function: Callable[..., None], size: int, directory: Path) -> Iterator[Any]:
    variables = {
        "PROCGROUP_RECORD_DIR": str(directory),
        "PROCGROUP_WAIT_REPORT_SECONDS": "0",
        "STOP": f"{directory}/stop",
    }
    with start(function, size, environment=variables) as world:
        deadline = time.monotonic() + 40
        while not all_have_made_calls(directory, size):
            assert time.monotonic() < deadline, [world.output(rank) for rank in range(size)]
            time.sleep(0.02)
        yield world


@pytest.fixture(name="working", scope="module")
def fixture_working(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The records of a job of three ranks that works until the end of these tests."""
    directory = tmp_path_factory.mktemp("records")
    with job(work, 3, directory):
        yield directory


@pytest.fixture(name="top", scope="module")
def fixture_top(working: Path) -> Iterator[Top]:
    top = Top(working)
    yield top
    top.close()


@pytest.fixture(name="served")
def fixture_served() -> Iterator[PageServer]:
    """A server of one page."""
    with PageServer(
        {"/": lambda parameters: HttpAnswer("text/plain", f"secret {dict(parameters)}")}, "default-src 'none'"
    ) as one:
        yield one


def get(address: str, *, host: str | None = None, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    """Return the status, the text and the headers of an answer."""
    request = urllib.request.Request(address, method=method, headers={} if host is None else {"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def without_token(server: PageServer) -> str:
    return server.address.partition("?")[0]


def raw(server: PageServer, *sent: bytes) -> bytes:
    """Return all that comes back until the server closes the connection."""
    with connect(server) as connection:
        for part in sent:
            connection.sendall(part)
        received = b""
        while more := connection.recv(65536):
            received += more
    return received


def connect(server: PageServer, host: str = "127.0.0.1") -> socket.socket:
    port = int(server.address.split(":")[2].partition("/")[0])
    return socket.create_connection((host, port), timeout=20)


def test_the_address_has_a_token_without_which_nothing_is_served(served: PageServer) -> None:
    assert get(served.address)[:2] == (200, "secret {}")
    assert get(f"{served.address}&since=3")[1] == "secret {'since': '3'}"
    for query in ("", "?token=", f"?token={served.token[:-1]}", f"?token={served.token}x", "?token=%ff%00", "?TOKEN=1"):
        status, text, _ = get(without_token(served) + query)
        assert status == 403 and "secret" not in text and served.token not in text


def test_each_server_has_another_token(served: PageServer) -> None:
    with PageServer({}, "") as other:
        assert other.token != served.token


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:80", 200),  # forwarded by ssh from another port
        ("LOCALHOST", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example:1", 403),
        ("[", 403),
        ("", 403),
    ],
)
def test_a_host_name_that_resolves_to_loopback_is_not_served(served: PageServer, host: str, status: int) -> None:
    assert get(served.address, host=host)[0] == status


def test_a_request_without_a_host_or_with_two_is_not_served(served: PageServer) -> None:
    line = f"GET /?token={served.token} HTTP/1.1\r\n".encode()
    assert raw(served, line, b"\r\n").startswith(b"HTTP/1.0 403 ")
    assert raw(served, line, b"Host: localhost\r\nHost: evil.example\r\n\r\n").startswith(b"HTTP/1.0 403 ")


def test_it_listens_on_one_address_of_loopback(served: PageServer) -> None:
    with pytest.raises(ConnectionRefusedError):  # which all interfaces together would accept
        connect(served, "127.0.0.2")


@pytest.mark.parametrize("method", ["POST", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_only_get_is_served(served: PageServer, method: str) -> None:
    status, text, _ = get(served.address, method=method)
    assert status == 501 and "secret" not in text


def test_another_path_is_not_found(served: PageServer) -> None:
    assert get(served.address.replace("/?", "/../etc/passwd?"))[0] == 404


def test_answers_are_not_stored_embedded_or_guessed_at_and_name_no_software(served: PageServer) -> None:
    for address in (served.address, without_token(served)):
        headers = get(address)[2]
        assert headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
        assert (headers["X-Content-Type-Options"], headers["Cross-Origin-Resource-Policy"]) == (
            "nosniff",
            "same-origin",
        )
        assert headers["Server"].strip() == "procgroup" and "Access-Control-Allow-Origin" not in headers


def test_a_large_request_is_not_read(served: PageServer) -> None:
    filler = b"X: " + b"x" * (web_server.MOST_HEAD_BYTES - 100) + b"\r\n"
    start_of_it = f"GET /?token={served.token} HTTP/1.1\r\nHost: localhost\r\n".encode()
    with pytest.raises(ConnectionError):  # closed with unread bytes
        assert raw(served, start_of_it, filler * 2, b"\r\n") == b""
        raise ConnectionResetError
    assert b"secret" in raw(served, start_of_it, filler[:-200] + b"\r\n", b"\r\n")


def test_a_slow_request_is_not_awaited(served: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "_HEAD_SECONDS", 0.1)
    assert raw(served, b"GET / HTTP/1.1\r\n") == b""


def test_so_many_connections_are_served_at_a_time(served: PageServer) -> None:
    silent = [connect(served) for _ in range(web_server.MOST_CONNECTIONS)]
    assert silent[0].send(b"G") == 1
    with connect(served) as one_more:
        assert one_more.recv(1) == b""
    for connection in silent:
        connection.close()
    deadline = time.monotonic() + 40
    while True:
        try:
            assert get(served.address)[0] == 200
            return
        except OSError:
            assert time.monotonic() < deadline


def test_the_page_allows_its_own_script_and_style_and_its_own_server_and_nothing_else(top: Top) -> None:
    status, text, headers = get(top.address)
    script, style = (
        base64.b64encode(hashlib.sha256(re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[0].encode()).digest())
        for tag in ("script", "style")
    )
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Content-Security-Policy"] == (
        f"default-src 'none'; script-src 'sha256-{script.decode()}'; style-src 'sha256-{style.decode()}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert not re.search(r"url\(|@import|https?://|<link|\bsrc=", text.replace("src=x", ""))
    assert EVIL not in text and top.address.partition("=")[2] not in text


def test_the_state_has_the_table_and_the_calls_since_a_moment(top: Top, working: Path) -> None:
    first = top.state()
    assert first["program"] and not first["ended"]
    assert re.fullmatch(r"3 ranks on \S+: 3 running; running for \S+ s", first["summary"])
    assert [row["cells"][0] for row in first["rows"]] == ["0", "1", "2"]
    assert all(row["cells"][7].startswith("step ") for row in first["rows"])
    lanes = first["calls"]["lanes"]
    assert [lane["rank"] for lane in lanes] == [0, 1, 2] and all(len(lane["calls"]) > 1 for lane in lanes)
    following, deadline = first, time.monotonic() + 40
    while following["calls"]["now"] == first["calls"]["now"]:  # a look is taken twice a second at most
        assert time.monotonic() < deadline
        time.sleep(0.1)
        following = top.state(since=first["calls"]["now"])
    for lane, after in zip(lanes, following["calls"]["lanes"], strict=True):
        held = {call[8] for call in lane["calls"]}
        assert len(after["calls"]) > 0 and max(call[8] for call in after["calls"]) > max(held)
        assert all(call[1] is None or call[1] > first["calls"]["now"] - 51_000 for call in after["calls"])
        assert held.union(call[8] for call in after["calls"]) == set(
            range(min(held), max(call[8] for call in after["calls"]) + 1)
        )


@pytest.mark.parametrize("since", ["nan", "x", "1e999", "-1e999"])
def test_a_moment_that_makes_no_sense_gives_an_answer_all_the_same(top: Top, since: str) -> None:
    assert top.state(since=since)["rows"]


def test_ctrl_c_ends_it_also_while_a_connection_is_open(working: Path) -> None:
    top = Top(working)
    try:
        with socket.create_connection(("127.0.0.1", int(re.findall(r":(\d+)/", top.address)[0])), timeout=20):
            top.process.send_signal(signal.SIGINT)
            assert top.process.wait(40) == 0
        assert top.line() == "Ctrl-C ends it\n" and top.line() == ""
    finally:
        top.close()


def test_a_port_can_be_chosen_and_one_that_is_taken_is_named(working: Path, top: Top) -> None:
    port = re.findall(r":(\d+)/", top.address)[0]
    environment = os.environ | {"PROCGROUP_RECORD_DIR": str(working)}
    done = subprocess.run(
        [sys.executable, "-m", "procgroup", "top", "--web", "--port", port],
        env=environment, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    said = f"procgroup top: cannot listen on 127.0.0.1:{port}: Address already in use; --port chooses another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "1"], "--port and --open go with --web"),
        (["--open"], "--port and --open go with --web"),
        (["--web", "--once"], "not allowed with argument"),
        (["--web", "--port", "70000"], "'70000' is not a port: 0 (a free one) to 65535"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "procgroup", "top", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2 and said in done.stderr


def test_a_browser_is_opened_without_the_token_on_its_command_line(working: Path, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/arguments\n')
    browser.chmod(0o755)
    top = Top(working, "--open", BROWSER=f"{browser} %s", TMPDIR=str(tmp_path))
    try:
        deadline = time.monotonic() + 40
        while not (tmp_path / "arguments").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        file = Path((tmp_path / "arguments").read_text().strip().removeprefix("file://"))
        assert html.escape(top.address) in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        top.process.send_signal(signal.SIGINT)
        assert top.process.wait(40) == 0 and not file.exists()
    finally:
        top.close()


def test_the_end_of_the_job_is_said_and_its_last_state_is_kept(tmp_path: Path) -> None:
    with job(work, 2, tmp_path) as world:
        top = Top(tmp_path)
        try:
            assert not top.state()["ended"]
            (tmp_path / "stop").touch()
            assert all(outcome.ok for outcome in world.wait())
            printed = top.lines_until("left in order")
            assert "the job has ended; the page stays until Ctrl-C\nall 2 ranks of job " in printed
            for path in tmp_path.glob("*/*"):
                path.unlink()
            state = top.state()
            assert state["ended"] and [row["state"] for row in state["rows"]] == ["left", "left"]
            assert state["findings"][0][0] == "well" and "left in order" in state["findings"][0][1]
        finally:
            top.close()


def test_a_rank_that_others_wait_for_is_marked_with_its_line(tmp_path: Path) -> None:
    with job(hang, 4, tmp_path):
        top = Top(tmp_path)
        try:
            deadline = time.monotonic() + 40
            while not re.search(r"it is in load_batch at \S+:\d+", str((state := top.state())["findings"])):
                assert time.monotonic() < deadline, state["findings"]
                time.sleep(0.3)
            assert [row["cause"] for row in state["rows"]] == [False, False, True, False]
            kind, sentence = state["findings"][0]
            assert kind == "wrong" and sentence.startswith(
                "rank 2 never entered all_reduce #4 of group 0 at test_top_web"
            )
        finally:
            top.close()


def test_a_record_says_since_when_it_holds_all_calls(tmp_path: Path) -> None:
    with job(work, 2, tmp_path):
        directory = next(path for path in tmp_path.iterdir() if path.is_dir())
        whole = reading.load(directory, with_stacks=False).ranks[0]
        part = reading.load(directory, with_stacks=False, newest=2).ranks[0]
        assert whole.whole_since == 0.0 < part.whole_since
        assert part.whole_since in [call.issued for call in part.calls]


@in_a_browser
def test_the_table_and_the_timeline_are_live(top: Top, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(top.address)
        step = "Number(/step (\\d+)/.exec(document.querySelector('.live tbody tr').innerText)[1])"
        first, calls = browser.evaluate(step), browser.evaluate("timeline.lanes[0].calls.length")
        end = browser.evaluate("timeline.end")
        browser.wait_for("Number(document.body.dataset.reads) >= 3")
        assert browser.evaluate(step) > first
        assert browser.evaluate("timeline.lanes[0].calls.length") > calls
        assert browser.evaluate("timeline.end") > end + 1e6
        assert browser.evaluate("timeline.lanes.every((lane) => lane.gaps.length === 0)")
        indexes = browser.evaluate("timeline.lanes[1].calls.map((call) => call.index)")
        assert indexes == list(range(indexes[0], indexes[0] + len(indexes)))
        assert browser.evaluate("document.getElementById('badge').textContent") == "live"
        assert browser.wait_for("document.querySelector('.live tr.slow td')?.textContent") == "1"
        assert "rank 1 is the last in" in browser.evaluate("document.querySelector('.findings .slow').textContent")
        assert browser.evaluate("document.title") != "owned" and not browser.evaluate("document.querySelector('img')")
        assert "<img src=x" in browser.evaluate("document.querySelector('.live tbody').innerText")
        assert browser.problems() == []


@in_a_browser
def test_the_view_follows_the_present_until_the_user_moves_it(top: Top, tmp_path: Path) -> None:
    following = "document.querySelector('button[data-do=follow]').ariaPressed"
    with Browser(tmp_path) as browser:
        browser.open(top.address)
        assert browser.evaluate(following) == "true"
        browser.evaluate("document.querySelector('button[data-do=in]').click()")
        assert browser.evaluate(following) == "true"  # zooming is not moving
        browser.evaluate("document.querySelector('button[data-do=left]').click()")
        assert browser.evaluate(following) == "false"
        view = browser.evaluate("[timeline.begin, timeline.end]")
        reads = int(browser.evaluate("document.body.dataset.reads || 0"))
        browser.wait_for(f"Number(document.body.dataset.reads) >= {reads + 2}")
        assert browser.evaluate("[timeline.begin, timeline.end]") == view
        browser.evaluate("document.querySelector('button[data-do=follow]').click()")
        browser.wait_for("timeline.begin > " + str(view[1]))
        assert browser.evaluate(following) == "true"
        assert browser.problems() == []


@in_a_browser
def test_calls_that_the_records_held_no_more_are_a_gap_and_old_ones_are_left_out(top: Top, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(top.address)
        script = """
        (() => {
          const calls = new Calls(3);
          const read = (now, whole, ...made) => calls.add({
            now, ops: ["barrier"], messages: [], texts: ["barrier", "a.py:1"],
            lanes: [0, 1].map((rank) => ({
              rank, group: "0", key: "k", size: 2, until: now, whole,
              calls: made.map(([index, start, end]) => [start + rank, end, 0, 0, 1, end ? 0 : 1, index + 1, 0, index]),
            })),
          });
          const shown = () => calls.lanes[0].calls.map((call) => [call.index, call.end, call.state, call.waited]);
          const said = [];
          read(100, null, [0, 10, 20], [1, 30, null]);
          said.push(shown(), [...calls.lanes[0].gaps]);
          read(200, null, [1, 30, 150]);
          said.push(shown(), [...calls.lanes[0].gaps]);
          read(300, 250, [90, 260, 270], [91, 280, null]);
          said.push(shown(), calls.lanes[0].gaps.map(([begin, end]) => [begin === -Infinity ? null : begin, end]));
          read(400, 390, [95, 391, 399]);
          said.push(shown(), calls.operations);
          return said;
        })()
        """
        said = browser.evaluate(script)
    assert said[0] == [[0, 20, "completed", 1], [1, 100, "started", 1]] and said[1] == []
    assert said[2] == [[0, 20, "completed", 1], [1, 150, "completed", 1]] and said[3] == []
    assert [call[0] for call in said[4]] == [1, 90, 91] and said[5] == [[None, 30], [200, 250]]
    assert [call[0] for call in said[6]] == [1, 90, 95]  # of call 91, which had not ended, nothing is known any more
    assert said[7] == [{"name": "barrier", "count": 6}]


@in_a_browser
def test_the_page_says_that_the_job_has_ended_and_keeps_the_last_state(tmp_path: Path) -> None:
    with job(work, 2, tmp_path) as world, Browser(tmp_path / "profile") as browser:
        top = Top(tmp_path)
        try:
            browser.open(top.address)
            (tmp_path / "stop").touch()
            world.wait()
            badge = "document.getElementById('badge').textContent"
            browser.wait_for(f"{badge} === 'ended: this is the last state'")
            reads = browser.evaluate("document.body.dataset.reads")
            top.process.send_signal(signal.SIGINT)
            top.process.wait(40)
            time.sleep(1.5)
            assert browser.evaluate("document.body.dataset.reads") == reads
            assert browser.evaluate("document.querySelectorAll('.live .state.left').length") == 2
            assert "left in order" in browser.evaluate("document.getElementById('findings').innerText")
            assert browser.problems() == []
        finally:
            top.close()


@in_a_browser
def test_the_page_says_when_the_server_is_gone_and_keeps_the_last_state(working: Path, tmp_path: Path) -> None:
    top = Top(working)
    try:
        with Browser(tmp_path) as browser:
            browser.open(top.address)
            top.process.send_signal(signal.SIGINT)
            top.process.wait(40)
            browser.wait_for("document.getElementById('badge').textContent.startsWith('procgroup top does not answer')")
            assert browser.evaluate("document.querySelectorAll('.live tbody tr').length") == 3
    finally:
        top.close()
